"""Plain-PyTorch references for the speculative tree: build and greedy verification, as SGLang's own kernels do them."""
