#!/usr/bin/env python3
"""EAGLE-3 with training-time test on the run's store; writes the best drafter to runs/<run>/drafter as SGLang loads it.

Run again, it goes on from the last checkpoint when config and data are the same; when they are not it starts anew, and keeps what was there in runs/<run>/earlier.

Several GPUs: --set train.gpus=[0,1] starts a process on each (train.parallel: ddp or fsdp); so does a torchrun of your own.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Callable

sys.path.insert(0, str(Path(__file__).resolve().parent))

import aerie  # noqa: F401  first: it finds the Python that has the packages
import numpy as np
import torch

from aerie.belongs import deciding, differences, fingerprint, recorded
from aerie.checkpoints import folder_of, last_checkpoint, load_checkpoint, one_training, read_state
from aerie.config import Config, add_config_arguments, config_from_args
from aerie.curves import Curves, draw_curves, warnings_of
from aerie.distributed import start_group
from aerie.drafter import Drafter
from aerie.drafter_fit import fit_drafter
from aerie.drafter_init import init_from_target, make_shape, start_from
from aerie.earlier import about_kept, forget_older, make_space, place_of_drafter, set_aside, take_back
from aerie.errors import EXIT_FAILED, UserError, run_main
from aerie.export import export_drafter
from aerie.extract_plan import make_plan
from aerie.gpus import apart, refuse_missing, training_env
from aerie.identity import model_hash, tokenizer_hash
from aerie.ops import choose_kernels
from aerie.paths import RunPaths
from aerie.progress import Progress
from aerie.report import read_report, write_report
from aerie.servers import make_room
from aerie.shapes import CHECKPOINT_BYTES
from aerie.store import Store, StreamingStore
from aerie.stream_train import StreamTrainer, total_steps, wait_for_heldout
from aerie.target_weights import TargetWeights
from aerie.together import run_together
from aerie.trainer import Trainer
from aerie.ttt_loss import TargetHead
from aerie.unroll import Fixed
from aerie.vocab import load_vocab_map

OVERFIT_STEPS, OVERFIT_SHARE = 300, 0.9
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def pick_device(config: Config) -> tuple[torch.device, torch.dtype]:
    """Device and compute dtype of this run."""
    name = config.train.device
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"train.device = {name!r}, but PyTorch sees no GPU here; set train.device=cpu")
    dtype = config.train.dtype
    return device, (torch.bfloat16 if device.type == "cuda" else torch.float32) if dtype == "auto" else DTYPES[dtype]


def check_store(config: Config, store: Store) -> None:
    """Refuse states of another target, other layers or another tokenizer."""
    manifest, target = store.manifest, config.model_path
    where = f"the store in {store.path}"
    if manifest.get("model_hash") != model_hash(target):
        raise UserError(f"{where} holds states of another model ({manifest.get('model_path')}) than target.model_path = {target}; extract again, or name that model")
    if manifest.get("aux_layer_ids") != config.target.aux_layer_ids:
        raise UserError(f"{where} holds states of layers {manifest.get('aux_layer_ids')}, target.aux_layer_ids is {config.target.aux_layer_ids}; extract again, or set them back")
    if manifest.get("tokenizer_hash") != tokenizer_hash(target):
        raise UserError(f"{where} was made with another tokenizer than the one in {target}; make data and extract again")


def target_head(manifest: dict, target: TargetWeights, draft_ids: torch.Tensor, device: torch.device, dtype: torch.dtype) -> TargetHead:
    """The target's LM head, whole and on the draft vocabulary."""
    head = target.lm_head().to(device, dtype)
    to_draft = torch.full((len(head),), -1, dtype=torch.int64)
    to_draft[draft_ids] = torch.arange(len(draft_ids))
    logits = manifest.get("logits") or {}
    ids = draft_ids.to(device)
    return TargetHead(head, head[ids].contiguous(), ids, to_draft.to(device), float(logits.get("logit_scale") or 1.0), float(logits.get("final_logit_softcapping") or 0.0))


def begin(config: Config, drafter: Drafter, target: TargetWeights, head: torch.Tensor, draft_ids: torch.Tensor, store: Store) -> str:
    """First weights of the drafter; returns a sentence about where they came from."""
    generator = torch.Generator().manual_seed(config.train.seed)
    drafter.reset(generator)
    if config.train.init_from:
        return start_from(Path(config.train.init_from).expanduser(), config, drafter, head, draft_ids)
    if config.draft.init == "random":
        return "random"
    taken = f"from the target's last layer and head: {', '.join(init_from_target(drafter, target, head, generator)) or 'nothing fitted'}"
    if config.draft.init == "fit":
        samples = (store.get(index) for index in np.flatnonzero(~store.heldout))
        if fit_drafter(drafter, samples, target.embedding(), head, generator):
            return "fitted to the states by least squares"
        print("draft.init=fit does not suit this drafter (MLA, norm options, or wider than 2048); starting as with auto", flush=True)
    return taken


def mend_export(trainer: Trainer, run: RunPaths, belongs: str, on_best: Callable[[Drafter, dict], None]) -> None:
    """After a resume: the drafter's folder is that of the best step so far, whatever happened to it meanwhile; else it is exported again."""
    step, group = trainer.state.best_step, trainer.group
    best = folder_of(run.checkpoints, step)
    if trainer.state.best < 0 or group.first(is_exported(run.drafter, belongs, step)):
        return
    if not group.first(best.is_dir()):
        print(f"{run.drafter} does not hold the drafter of step {step}, the best so far, and no checkpoint does: the next one that is evaluated is exported", flush=True)
        trainer.forget_best()
    elif not group.rank:
        print(f"{run.drafter} does not hold the drafter of step {step}, the best so far: it is made again from {best.name}", flush=True)
        drafter, rng = Drafter(trainer.drafter.shape), torch.get_rng_state()
        load_checkpoint(best, drafter, None)
        torch.set_rng_state(rng)
        on_best(drafter, next(found for found in trainer.state.evals if found["step"] == step))


def is_exported(folder: Path, belongs: str, step: int) -> bool:
    """Whether the folder holds what this training exported at this step."""
    try:
        found = read_report(folder / "training.json")
    except UserError:
        return False
    return (folder / "model.safetensors").is_file() and (found.get("fingerprint"), found.get("step")) == (belongs, step)


def verdict(found: dict, samples: int) -> int:
    """Of --overfit: a sound pipeline memorises a few samples nearly whole. Returns the exit code."""
    share = found["predicted_accept_length"] / max(found["possible_accept_length"], 1e-9)
    sound = share >= OVERFIT_SHARE
    print(f"{'sound' if sound else 'NOT sound'}: {samples} memorised samples give accept length {found['predicted_accept_length']:.2f} of {found['possible_accept_length']:.2f} possible "
          f"({100 * share:.0f}%, {100 * OVERFIT_SHARE:.0f}% asked for)"
          + ("" if sound else "; look at alignment, mask, draft vocabulary (data/report.json: coverage) and train.lr before a long run"), flush=True)  # fmt: skip
    return 0 if sound else EXIT_FAILED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint; an error when there is none or it is of another run")
    parser.add_argument("--stream", action="store_true", help="train while the extraction runs, each shard once (run_stream.py starts both)")
    parser.add_argument("--overfit", type=int, default=0, metavar="N", help="the test before a long run: memorise N samples and say whether the pipeline is sound (exit code 1 if not)")
    parser.add_argument("--fresh", action="store_true", help="start anew, whatever checkpoints there are")
    args = parser.parse_args()
    config = config_from_args(args)
    train, run = config.train, config.run
    if args.overfit < 0 or args.overfit and (args.stream or args.resume):
        raise UserError(f"--overfit {args.overfit} memorises that many samples of a whole store, 1 or more, always anew; leave out --stream and --resume")
    if args.resume and args.fresh:
        raise UserError("--resume goes on and --fresh starts anew; leave one of them out")
    folder = run.root / "overfit" if args.overfit else run.drafter  # a drafter that knows a few samples by heart is nobody's best
    if args.stream and len(train.gpus) > 1:
        raise UserError(f"--stream trains in one process, and train.gpus = {train.gpus} names several GPUs; name one, or train after the extraction")
    os.environ |= (env := training_env(train.gpus))
    refuse_missing(train.gpus, train.device, torch.cuda.device_count())
    if env and len(train.gpus) > 1:
        check_store(config, Store.open(run.store))  # before processes start
        return run_together(len(train.gpus), sys.argv, run.logs)
    if train.threads:
        torch.set_num_threads(train.threads)
    torch.manual_seed(train.seed)
    device, dtype = pick_device(config)
    group = start_group(device.type == "cuda")
    fast, kernels = choose_kernels(train.kernels, device)
    if group.world > 1 and args.stream:
        raise UserError("--stream trains in one process; start it without torchrun, or train after the extraction")
    if group.rank:
        sys.stdout = open(os.devnull, "w")  # the first process speaks for all
    lock = None if group.rank else one_training(run)  # noqa: F841  held until this process ends
    target = TargetWeights(config.model_path, "make it with `make target`" if config.target.from_package else "")
    stream = StreamingStore(run.store) if args.stream else None
    planned = make_plan(run.data, config.extract.all_final_rows) if stream else None
    store = wait_for_heldout(stream, sum(job.heldout for job in planned.jobs), print) if stream else Store.open(run.store)
    check_store(config, store)
    if not stream and (gone := store.missing_shards()):
        raise UserError(f"{len(gone)} shards of the store in {store.path} are missing, the first: {gone[0]}; run `make extract`, which asks for their samples again")
    if not stream and not store.manifest.get("complete"):
        print(f"note: the store is not complete ({len(store):,} of {store.manifest.get('planned', 0):,} samples); `make extract` goes on with the others", flush=True)
    if not args.stream and not apart(config) and group.rank == 0:
        make_room(config)
    shape = make_shape(config, target)
    vocab = load_vocab_map(run.data / "vocab_map.safetensors", store.manifest["tokenizer_hash"], shape.vocab_size, config.draft.vocab_size)
    draft_ids = torch.from_numpy(vocab.d2t + np.arange(len(vocab.d2t)))
    training, heldout = np.flatnonzero(~store.heldout), np.flatnonzero(store.heldout)
    if not len(training) and not stream:
        raise UserError(f"the store in {store.path} holds no training sample; make data and extract first")
    if args.overfit:
        if args.overfit > len(training):
            print(f"--overfit {args.overfit}: the store holds {len(training)} samples to train on, all of them are taken", flush=True)
        training = heldout = training[: args.overfit]
        train.eval_samples, train.eval_every, train.epochs, train.aux_noise, train.weight_decay = len(training), OVERFIT_STEPS, OVERFIT_STEPS, 0.0, 0.0
    head = target_head(store.manifest, target, draft_ids, device, dtype)
    drafter = Drafter(shape, device=device)
    origin = begin(config, drafter, target, head.draft_head, draft_ids, store)
    drafter.set_compute(dtype)
    drafter.fast = fast
    fixed = Fixed(target.embedding().to(device, dtype), head, train.ttt_steps, train.step_decay, train.activation_checkpointing)
    export_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    parts = deciding(config, vocab.metadata, store.manifest["data_hash"] if stream else store.ids, group.world)
    belongs, settings = fingerprint(parts), recorded(parts)
    identity = {
        "model_hash": store.manifest["model_hash"], "tokenizer_hash": store.manifest["tokenizer_hash"], "aux_layer_ids": config.target.aux_layer_ids,
        "capture_points": store.manifest.get("capture_points"), "fc_norm": shape.fc_norm, "norm_before_fc": shape.norm_before_fc, "norm_output": shape.norm_output,
        "num_steps": config.serve.num_steps, "fingerprint": belongs, "settings": settings,
        "served_dtype": config.target.dtype if config.target.dtype != "auto" else store.manifest["dtype"],  # auto: of the states, which the server wrote as it computed them
    }  # fmt: skip

    def export(best: Drafter, training_json: dict, walks: dict[str, list[str]] | None = None) -> None:
        keep = None if args.overfit else place_of_drafter(run, belongs)
        export_drafter(folder, best, draft_ids, config.target.aux_layer_ids, target.config, export_dtype, training_json, walks, keep)
        if keep:
            os.utime(keep)
            print(f"the drafter that was in {folder} is of another training: it is kept in {keep}", flush=True)

    def on_best(best: Drafter, found: dict) -> None:
        if group.rank:
            return
        print(f"step {found['step']}: predicted accept length {found['predicted_accept_length']:.3f}, held-out accuracy "
              f"{', '.join(f'{value:.3f}' for value in found['accuracy'])}; exported", flush=True)  # fmt: skip
        training_json = {**identity, "step": found["step"], "predicted_accept_length": found["predicted_accept_length"]}
        export(best, training_json, trainer.state.walks)

    if stream:
        steps = total_steps(planned, train.batch_tokens, train.accumulate)
        trainer = StreamTrainer(stream, steps, train, drafter, fixed, store, run.checkpoints, config.serve.num_steps, on_best)
        training = [job for job in planned.jobs if not job.heldout]
    else:
        trainer = Trainer(train, drafter, fixed, store, training, heldout, None if args.overfit else run.checkpoints, config.serve.num_steps, on_best, group)
    if args.overfit:
        trainer.plan.steps = trainer.plan.steps[:OVERFIT_STEPS]
    drafter_size = sum(p.numel() for p in drafter.parameters())
    print(f"drafter: {drafter_size / 1e6:.1f} M parameters, {origin}; {dtype} on {device}, {kernels}", flush=True)
    print(f"{len(training)} samples to train on, {len(heldout[: train.eval_samples])} held out; {len(trainer.plan.steps)} steps{'' if args.overfit else f' in {train.epochs} epochs'}", flush=True)
    if not (args.overfit or args.fresh or group.rank) and (not stream or stream.consumed()):  # a store that was begun anew is no earlier stream's
        take_back(run, belongs)
    group.barrier()
    latest = None if args.overfit else last_checkpoint(run.checkpoints)
    found = {} if latest is None or args.fresh else read_state(latest)
    why = f"{latest} is of another training: {differences(found.get('settings'), settings)}" if latest else f"no checkpoint in {run.checkpoints}"
    if latest is not None and found.get("fingerprint") == belongs:
        trainer.resume(latest)
        if stream:
            trainer.resume_stream(found["trained_shards"])
        print(f"resumed from {latest.name}", flush=True)
        mend_export(trainer, run, belongs, on_best)
    elif args.resume:
        raise UserError(f"nothing to resume: {why}; set that back, or leave out --resume to start anew (what is there is kept)")
    elif stream and stream.consumed():
        raise UserError(f"{len(stream.consumed())} shards of {run.store} were consumed by an earlier training that no checkpoint in {run.checkpoints} belongs to; set its config back, or remove the store and begin anew")
    else:
        group.barrier()  # all have looked
        if not args.overfit and not group.rank:
            make_space(run, CHECKPOINT_BYTES * drafter_size, args.fresh)
            kept = set_aside(run, belongs if args.fresh else "")
            if latest is not None:
                print("starting anew" + ("" if args.fresh else f": {why}") + about_kept(run, kept), flush=True)
    trainer.extra_state = {"fingerprint": belongs, "settings": settings}
    if not args.overfit and not group.rank:
        trainer.on_saved = lambda: forget_older(run)
    tensorboard = Curves(run.root / "tensorboard" / ("overfit" if args.overfit else "")) if not group.rank else None
    if tensorboard:
        trainer.on_numbers = tensorboard.add
    progress = Progress(len(training) * train.epochs, "trained", already=trainer.state.samples, stream=open(os.devnull, "w") if group.rank else None)
    started = time.monotonic()
    state = trainer.run(progress)
    progress.close()
    full = trainer.full_drafter() if state.best < 0 else drafter
    group.leave()
    if group.rank:
        return 0
    tensorboard.close()
    if state.best < 0:  # no held-out samples: the last weights are all there is
        export(full, {**identity, "step": state.step})
    warnings = warnings_of(state.history, state.evals)
    for warning in warnings:
        print(f"warning: {warning}", flush=True)
    best = next((found for found in state.evals if found["step"] == state.best_step), {})
    report = write_report(
        folder / "report.json", config=config.as_dict(), predicted_accept_length=best.get("predicted_accept_length"), best_step=state.best_step, steps=state.step,
        epochs=train.epochs, samples=state.samples, tokens=state.tokens, supervised_rows=state.rows, train_seconds=state.seconds,
        train_tok_s=state.tokens / max(state.seconds, 1e-9), wall_seconds=time.monotonic() - started, eval=best, evals=state.evals, history=state.history,
        bad_samples=(state.bad or trainer.reader.bad) | trainer.eval_reader.bad, processes=group.world, warnings=warnings, stopped_early=trainer.stop_reason, drafter_parameters=drafter_size,
        init=origin, compute_dtype=str(dtype), **({"peak_gpu_bytes": torch.cuda.max_memory_allocated()} if device.type == "cuda" else {}),
    )  # fmt: skip
    print(f"trained on {state.samples} samples in {state.seconds:.0f} s, {report['train_tok_s']:.0f} tok/s; predicted accept length "
          f"{report['predicted_accept_length'] or float('nan'):.3f} (step {state.best_step}); {folder}", flush=True)  # fmt: skip
    draw_curves(folder / "curves.png", state.history, state.evals)  # after the report: what cannot be drawn is trained all the same
    if args.overfit:
        return verdict(best, len(training))
    return 0


if __name__ == "__main__":
    run_main(main)
