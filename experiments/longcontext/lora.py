"""LoRA as merged weights: the model stays as it is, the adapter lives beside it.

Before each step W + scale * B A is written into the model, rounded to its dtype as a run will round
it. The gradient of a merged weight, dW, gives those of the factors by the chain rule:
dB = scale dW A^T and dA = scale B^T dW. Against adapters as extra layers this costs one product
per weight for dW, and saves every extra pass over the activations, which are far larger here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Lora:
    """Factors in fp32 of every linear layer of a decoder but its output layer.

    A is drawn like a linear layer's weights, B is zero: at first the model is its base, until
    `load_state` gives it the factors of an adapter.
    """

    def __init__(self, model: Any, *, rank: int, alpha: float, seed: int):
        """`model` holds the base's weights in fp32; they are copied."""
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        output = model.get_output_embeddings()
        self._layers: dict[str, nn.Linear] = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and layer is not output
        }
        self._base = {name: layer.weight.detach().clone() for name, layer in self._layers.items()}
        draw = torch.Generator().manual_seed(seed)
        self.a: dict[str, nn.Parameter] = {}
        self.b: dict[str, nn.Parameter] = {}
        for name, weight in self._base.items():
            out, into = weight.shape
            drawn = (torch.rand(rank, into, generator=draw) * 2 - 1) * into**-0.5
            self.a[name] = nn.Parameter(drawn.to(weight.device))
            self.b[name] = nn.Parameter(torch.zeros(out, rank, device=weight.device))
        model.requires_grad_(False)
        for layer in self._layers.values():
            layer.weight.requires_grad_(True)

    @property
    def targets(self) -> list[str]:
        return list(self._layers)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.a.values(), *self.b.values()]

    def matrices(self, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        return {n: (self.a[n].detach().to(dtype), self.b[n].detach().to(dtype)) for n in self.a}

    @torch.no_grad()
    def merge(self) -> None:
        """Write the merged weights into the model."""
        for name, layer in self._layers.items():
            layer.weight.copy_(
                torch.addmm(self._base[name], self.b[name], self.a[name], alpha=self.scale)
            )

    @torch.no_grad()
    def pull_gradients(self) -> None:
        """From the model's weights to the factors; the model's are cleared."""
        for name, layer in self._layers.items():
            assert layer.weight.grad is not None
            gradient = layer.weight.grad.float()
            self.b[name].grad = self.scale * (gradient @ self.a[name].T)
            self.a[name].grad = self.scale * (self.b[name].T @ gradient)
            layer.weight.grad = None

    def state(self) -> dict[str, Any]:
        return {"a": _plain(self.a), "b": _plain(self.b)}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        for own, given in ((self.a, state["a"]), (self.b, state["b"])):
            for name, parameter in own.items():
                parameter.copy_(given[name])


def _plain(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in parameters.items()}
