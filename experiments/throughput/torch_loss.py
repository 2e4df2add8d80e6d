"""The cross-entropy of a PyTorch decoder, a few thousand tokens' logits at a time."""

# PyTorch is no dependency of this repository.
# pyright: reportMissingImports=false

from typing import Any

import torch
from torch.nn import functional

_IGNORED = -100


class Decoder(torch.nn.Module):
    """A decoder of Transformers whose forward is the loss of predicting each next token.

    The head and its loss are one module that is called once a step. So what DeepSpeed and FSDP2
    hook to modules gathers the head's weight once forward and once backward, however many parts
    there are.
    """

    def __init__(self, model: Any, num_tokens: int):
        """Takes the parts of a model over.

        Args:
            model: A causal language model of Transformers.
            num_tokens: Of how many tokens the logits exist at once.
        """
        super().__init__()
        self.model = model.model
        self.head = _Head(model.lm_head.weight, num_tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of predicting [batch, length] tokens from those before them."""
        return self.head(self.model(input_ids=tokens).last_hidden_state, tokens)


class _Head(torch.nn.Module):
    def __init__(self, weight: torch.nn.Parameter, num_tokens: int):
        super().__init__()
        self.weight = weight
        self._num_tokens = num_tokens

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        labels = functional.pad(tokens[:, 1:], (0, 1), value=_IGNORED).flatten()
        return _LossInParts.apply(hidden.flatten(0, 1), self.weight, labels, self._num_tokens)  # type: ignore


class _LossInParts(torch.autograd.Function):
    """Computes gradients with the loss, so that no logits are kept and none are computed again.

    Backward reads nothing but these gradients: it needs no weight, wherever an engine has put it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        count = (labels != _IGNORED).sum()
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden)
        # The sum over parts would lose digits in bf16.
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        parts = zip(
            hidden.split(num_tokens),
            labels.split(num_tokens),
            hidden_grad.split(num_tokens),
            strict=True,
        )
        for part, part_labels, part_grad in parts:
            logits = (part @ weight.t()).float()
            loss += functional.cross_entropy(
                logits, part_labels, ignore_index=_IGNORED, reduction="sum"
            )
            wanted = (part_labels != _IGNORED)[:, None]
            grad = logits.sub_(logits.logsumexp(1, keepdim=True)).exp_()
            grad.scatter_add_(1, part_labels.clamp(min=0)[:, None], -torch.ones_like(grad[:, :1]))
            grad = grad.mul_(wanted / count).to(weight.dtype)
            torch.mm(grad, weight, out=part_grad)
            weight_grad += grad.t() @ part
        ctx.save_for_backward(hidden_grad, weight_grad.to(weight.dtype))
        return loss / count

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grads[0], weight_grad * grads[0], None, None
