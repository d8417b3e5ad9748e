"""The embedded default's family: a LlamaGen-shaped decoder (arXiv 2406.06525) with a prefix of words."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lanternpp.models.prompted import PromptedConfig, PromptedTarget
from lanternpp.models.vq.folder import read_vq
from lanternpp.models.vq.model import VQ
from lanternpp.nn.backend import backend
from lanternpp.nn.configs import Codes, Width


@dataclass(frozen=True)
class WordsConfig(PromptedConfig):
    """The shape of a words target. `factored` tables are those of training: table + codebook @ basis."""

    vocab: Codes = 4096
    code_dim: Width = 8
    factored: bool = False


class CodeTable(nn.Module):
    """One vector per code, [V, D]: free, or (in training) free + a linear map of the code's latent."""

    def __init__(self, vocab: int, dim: int, code_dim: int | None):
        super().__init__()
        self.table = nn.Parameter(nn.init.normal_(torch.empty(vocab, dim), std=0.02))
        self.basis = nn.Parameter(nn.init.normal_(torch.empty(code_dim, dim), std=0.1)) if code_dim else None
        self.linear: nn.Module | None = None  # packed: computes `logits`, and has the table

    def matrix(self, codebook: Tensor) -> Tensor:
        """The vectors of all codes, [V, D]."""
        if self.linear is not None:
            return self.linear.weight  # type: ignore[return-value]
        return self.table if self.basis is None else self.table + codebook.to(self.table.dtype) @ self.basis

    def pack(self) -> None:
        """Make the table the weight of a packed linear layer; only the plain one of inference can be."""
        if self.basis is None and self.linear is None:
            vocab, dim = self.table.shape
            self.linear = plain = nn.Linear(dim, vocab, bias=False, device="meta")
            plain.weight = self.table
            backend().pack(self)
            if self.linear is plain:
                self.linear = None
            else:
                del self.table

    def logits(self, features: Tensor, codebook: Tensor) -> Tensor:
        """features [..., D] -> their products with all vectors, [..., V]."""
        if self.linear is not None:
            found: Tensor = self.linear(features)
            return found
        return nn.functional.linear(features, self.matrix(codebook))


class WordsTarget(PromptedTarget):
    """Codes after a prefix of word slots."""

    config_class = WordsConfig
    tokenizer = staticmethod(read_vq)
    config: WordsConfig

    def __init__(self, config: WordsConfig, vq: VQ):
        super().__init__(config, vq)
        self.vocab = config.vocab

    def add_tables(self) -> None:
        """A table of codes for the input and one for the output."""
        config = self.config
        code_dim = config.code_dim if config.factored else None
        self.codes_in = CodeTable(config.vocab, config.dim, code_dim)
        self.codes_out = CodeTable(config.vocab, config.dim, code_dim)

    def misfit(self) -> tuple[str, str] | None:
        """Codes, and their number."""
        found, config = self.vq, self.config
        if (len(found.codebook), found.length) == (config.vocab, self.length):
            return None
        return (
            f"{config.vocab} codes on a grid of {config.grid}",
            f"{len(found.codebook)} codes and {found.length} per picture",
        )

    @property
    def codebook(self) -> Tensor:
        """[V, C] l2-normalised latents."""
        book: Tensor = self.vq.codebook
        return book

    def embed(self, codes: Tensor) -> Tensor:
        """codes [R, N] -> [R, N, D]."""
        return self.codes_in.matrix(self.codebook)[codes]

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> logits [..., V]."""
        return self.codes_out.logits(features, self.codebook)

    @property
    def head_linear(self) -> nn.Module | None:
        """That of its table of codes, once it is packed."""
        return self.codes_out.linear

    def pack(self) -> None:
        """Prepare for passes over few rows."""
        super().pack()
        self.codes_out.pack()

    def folded(self) -> tuple[WordsConfig, dict[str, Tensor]]:
        """The same model with plain code tables: what is written to disk for inference."""
        tensors = {k: v for k, v in self.state_dict().items() if not k.endswith(".basis")}
        for name, table in (("codes_in", self.codes_in), ("codes_out", self.codes_out)):
            tensors[f"{name}.table"] = table.matrix(self.codebook).detach()
        return replace(self.config, factored=False, dropout=0.0), tensors
