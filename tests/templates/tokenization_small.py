"""A tokenizer as model folders bring it with them: tiktoken behind the interface of transformers, no offsets, its own encode()."""

import base64
from pathlib import Path

import tiktoken
from transformers import PreTrainedTokenizer


class SmallTikToken(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        lines = Path(vocab_file).read_text().splitlines()
        ranks = {base64.b64decode(piece): int(rank) for piece, rank in (line.split() for line in lines)}
        self.special_tokens = {str(token): int(number) for number, token in (added_tokens_decoder or {}).items()}
        self.model = tiktoken.Encoding("small", pat_str=r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+", mergeable_ranks=ranks, special_tokens=self.special_tokens)
        self.pieces = {number: self.model.decode_single_token_bytes(number) for number in [*ranks.values(), *self.special_tokens.values()]}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return {piece.decode("latin-1") if number not in self.special_tokens.values() else piece.decode(): number for number, piece in self.pieces.items()}

    def encode(self, text, allow_special_tokens=True, **kwargs):
        if kwargs:
            raise TypeError(f"this tokenizer's encode() does not take {sorted(kwargs)}")
        return self.model.encode(text, allowed_special="all") if allow_special_tokens else self.model.encode_ordinary(text)

    def decode(self, token_ids, **kwargs):
        return self.model.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def _tokenize(self, text, **kwargs):
        return [self.pieces[number].decode("latin-1") for number in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.special_tokens.get(token, next((number for number, piece in self.pieces.items() if piece.decode("latin-1") == token), None))

    def _convert_id_to_token(self, index):
        return self.pieces[index].decode("latin-1")
