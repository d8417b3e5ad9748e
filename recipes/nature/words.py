"""The words of captions, and the training of a target over codes: a caption's words and the codes so far -> the next code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import Cooldown, fraction
from lanternpp.accept.exact import Exact
from lanternpp.api.model import pack_target
from lanternpp.engine.batching import generate
from lanternpp.engine.decode import engine_class
from lanternpp.engine.sampling import Guidance, Sampling
from lanternpp.errors import InputError
from lanternpp.evaluation.classifier import fingerprint
from lanternpp.models.vq.autoencoder import VQ, Autoencoder
from lanternpp.models.words import IGNORED_WORDS, PromptedConfig, PromptedTarget, WordsConfig, WordsTarget
from lanternpp.nn.decoder import causal_mask
from lanternpp.proposers.no_draft import NoDraft
from lanternpp.training.codes import Codes, CodesTask, Sampler, Split
from lanternpp.training.loop import averaged, descend, muon_and_adamw
from lanternpp.training.options import Batch, Decay, Seed, Warmup
from lanternpp.training.team import autocast, compute_dtype
from lanternpp.util.options import Option
from pictures import sheet
from weights import begin_target, init_weights

SAMPLE_PICTURES = 4  # pictures drawn at a check


def split_words(text: str) -> list[str]:
    """The words of a caption, in lower case, without those that carry no meaning (`IGNORED_WORDS`)."""
    return [word for word in re.findall(r"[^\W_]+", text.lower()) if word not in IGNORED_WORDS]


def word_ids(model: PromptedTarget, split: Split) -> Tensor:
    """The captions of a split as ids [M, T]; a caption without meaningful words is the null caption."""
    ids = {text: model.word_ids(text if split_words(text) else None) for text in set(split.texts)}
    return torch.tensor([ids[text] for text in split.texts])


def vocabulary(codes: Codes, slots: int) -> dict[str, Any]:
    """Words, subjects and slots of the captions.

    Subjects are the words of the labels; where labels are missing, or some caption names none of them,
    any word will do as a subject.
    """
    texts = [*codes.train.texts, *codes.val.texts]
    caption_words = [split_words(text) for text in texts]
    counts = Counter(word for words in caption_words for word in words)
    if not counts:
        raise InputError(
            "no caption says anything: their words are all of " + ", ".join(sorted(IGNORED_WORDS))
        )
    words = sorted(counts, key=lambda word: (-counts[word], word))
    labels = {word for label in codes.train.labels for word in split_words(label)} & counts.keys()
    all_named = all(not words_of or labels.intersection(words_of) for words_of in caption_words)
    subjects = sorted(labels) if labels and all_named else words
    return {
        "words": tuple(words),
        "subjects": tuple(subjects),
        "slots": max(slots, max(len(words_of) for words_of in caption_words)),
    }


@dataclass(frozen=True)
class TargetSettings:
    """Hyperparameters: all that decides the result, except the budget and the machine."""

    batch_size: Batch = 32
    lr: Annotated[float, Option("Peak rate of AdamW (tables, prefix, norms).", gt=0, le=1)] = 1.5e-3
    muon_lr: Annotated[float, Option("Peak rate of Muon (matrices), in AdamW's scale.", gt=0, le=1)] = 2e-3
    corrupt: Annotated[
        float, fraction("Share of the codes it reads replaced by random ones.", group="Softmax")
    ] = 0.0
    drop_captions: Annotated[float, fraction("Share of the captions that are hidden, for guidance.")] = 0.1
    decay: Decay = 0.995
    warmup: Warmup = 100
    cooldown: Cooldown = 0.2
    cfg: Annotated[float, Option("Guidance of the sample pictures.", ge=1)] = 2.5
    seed: Seed = 0


class FactoredTable(nn.Module):
    """One vector per code, [V, D]: a free one plus a linear map of the code's latent."""

    def __init__(self, vocab: int, dim: int, code_dim: int):
        super().__init__()
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(vocab, dim), std=0.02))
        self.basis = nn.Parameter(nn.init.normal_(torch.empty(code_dim, dim), std=0.1))

    def matrix(self, codebook: Tensor) -> Tensor:
        """The vectors of all codes, [V, D], from their latents [V, C]."""
        return self.weight + codebook.to(self.weight.dtype) @ self.basis


class FactoredWords(WordsTarget):
    """A target as it is trained: what is learned of one code serves its neighbours from the first step."""

    def add_tables(self) -> None:
        """A table of codes for the input and one for the output."""
        sizes = self.config.vocab, self.config.dim, self.vq.codebook.shape[1]
        self.codes_in, self.codes_out = FactoredTable(*sizes), FactoredTable(*sizes)  # type: ignore[assignment]

    def tables(self) -> dict[str, FactoredTable]:
        """The tables by their names."""
        return {"codes_in": self.codes_in, "codes_out": self.codes_out}  # type: ignore[dict-item]

    def embed(self, codes: Tensor) -> Tensor:
        """codes [R, N] -> [R, N, D]."""
        return self.tables()["codes_in"].matrix(self.vq.codebook)[codes]

    def head(self, features: Tensor) -> Tensor:
        """features [..., D] -> logits [..., V]."""
        return F.linear(features, self.tables()["codes_out"].matrix(self.vq.codebook))


def plain(model: PromptedTarget) -> tuple[type[PromptedTarget], PromptedConfig, dict[str, Tensor]]:
    """The same model as it draws, and as a model folder holds it, with plain tables of codes: its class, config and tensors."""
    kind, tensors = type(model), model.state_dict()
    if isinstance(model, FactoredWords):
        kind = WordsTarget
        for name, table in model.tables().items():
            del tensors[f"{name}.basis"]
            tensors[f"{name}.weight"] = table.matrix(model.vq.codebook).detach()
    return kind, replace(model.config, dropout=0.0), tensors


class TargetTask(CodesTask):
    """A words target on cached codes."""

    check_pictures = 256
    name = "target"
    keep = "nll"
    kind = "words"  # in the config
    target: type[PromptedTarget] = FactoredWords
    model: PromptedTarget
    average: PromptedTarget

    def __init__(
        self,
        config: PromptedConfig,
        settings: TargetSettings,
        codes: Codes,
        vq: Autoencoder,
        device: torch.device,
        start: PromptedTarget | None = None,
    ):
        """start: a target whose layers have the same shape, with whose weights it begins."""
        torch.manual_seed(settings.seed)
        self.config, self.hparams, self.codes, self.device = config, settings, codes, device
        self.data = codes.data
        known = {"weights_of": start and fingerprint(start), "data": codes.key}
        self.settings = {**asdict(config), **asdict(settings), **known}
        self.vq = vq.to(device)
        model = self.make()
        if start is not None:
            self.first_weights = self.begin(model, start)
        self.model = model.to(device).train()
        self.average = averaged(self.model)
        self.dtype = compute_dtype(device)
        matrices = [p for p in self.model.decoder.blocks.parameters() if p.ndim == 2]
        self.optimizers = muon_and_adamw(self.model, matrices, settings.muon_lr, settings.lr, decay=0.1)
        self.others = self.optimizers["adamw"].param_groups[0]["params"]
        num_pictures, variants = codes.train.codes.shape[:2]
        self.sampler = Sampler(num_pictures, variants, settings.batch_size, settings.seed)
        self.words, self.val_words = (word_ids(self.model, split) for split in (codes.train, codes.val))
        self.baseline = self.simplest()
        self.prompts = [text for text, _ in Counter(codes.train.texts).most_common() if split_words(text)]

    def make(self) -> PromptedTarget:
        """The target, with first weights."""
        assert isinstance(self.config, WordsConfig) and isinstance(self.vq, VQ)
        model = FactoredWords(self.config, self.vq)
        for table, basis, free in zip(model.tables().values(), (0.3, 0.02), (0.02, 0.002), strict=True):
            # similar codes begin with similar vectors, and the logits near zero
            nn.init.normal_(table.weight, std=free)
            nn.init.normal_(table.basis, std=basis)
        init_weights(model)
        return model

    def begin(self, model: PromptedTarget, start: PromptedTarget) -> str:
        """Give the target weights of another one; which are taken and which are new."""
        return begin_target(model, start)

    def simplest(self) -> dict[str, float]:
        """The validation loss of a model without context, for comparison."""
        return {"unigram": unigram(self.codes, self.model.vocab)}

    def speed_up(self) -> None:
        """Compile the network, its head and the loss as one graph of one shape."""
        if self.device.type == "cpu":
            length = self.config.slots + self.config.grid**2 - 1
            self.model.decoder.causal = causal_mask(length, torch.empty(0, dtype=self.dtype))
        self.loss = torch.compile(self.loss, fullgraph=True, dynamic=False)  # type: ignore[method-assign]

    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update."""
        index, variant, generator = self.sampler(step)
        codes = self.model.from_cache(self.codes.train.pick(index, variant).to(self.device))
        null = torch.rand(len(index), generator=generator) < self.hparams.drop_captions
        input_codes = corrupt_codes(codes, self.hparams.corrupt, self.model.vocab, generator)
        with autocast(self.device):
            loss = self.loss(self.words[index].to(self.device), null.to(self.device), input_codes, codes)
        descend(self.optimizers.values(), loss, self.others)
        return {"loss": loss}

    def loss(self, words: Tensor, null: Tensor, input_codes: Tensor, codes: Tensor) -> Tensor:
        """Mean nats per code: words [B, T], null [B] bool, input_codes and codes [B, length]."""
        logits = code_logits(self.model, words, null, input_codes, self.dtype)
        return F.cross_entropy(logits.flatten(0, 1).float(), codes.flatten())

    def validate_on(self, index: Tensor) -> dict[str, float]:
        """Figures of the average on validation pictures [M], captions given, no guidance."""
        losses, best = [], []
        for codes, logits in self.predicted(index):
            logp = logits.float().log_softmax(-1)
            losses.append(-logp.gather(-1, codes[..., None]).flatten())
            best.append(logp.amax(-1).exp().flatten())
        top = torch.cat(best)
        return {
            "nll": torch.cat(losses).mean().item(),
            **self.baseline,
            "top1": top.median().item(),
            "ambiguous": (top < 0.05).double().mean().item(),
        }

    def predicted(self, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Validation pictures [M], some at a time: (codes [B, length], the average's logits [B, length, V])."""
        generator = torch.Generator().manual_seed(0)
        for part in index.split(16):
            found = self.codes.val.pick(part).to(self.device)
            codes = self.average.from_cache(found, generator)
            null = torch.zeros(len(part), dtype=torch.bool, device=self.device)
            words = self.val_words[part].to(self.device)
            with autocast(self.device):
                logits = code_logits(self.average, words, null, codes, self.dtype)
            yield codes, logits

    @torch.no_grad()
    def sample(self, path: Path) -> None:
        """The most frequent captions, drawn by plain AR with guidance."""
        prompts = self.prompts[:SAMPLE_PICTURES]
        kind, config, tensors = plain(self.average)
        target = kind(config, self.vq)
        target.load_state_dict(tensors)
        target.to(device=self.device, dtype=self.dtype).eval().requires_grad_(False)
        pack_target(target)
        guidance = Guidance(self.hparams.cfg)
        engine = engine_class(target)(target, NoDraft(), Exact(), Sampling(), guidance, len(prompts))
        codes = torch.stack([h.codes for h in generate(engine, list(prompts), list(range(len(prompts))))])
        sheet(target.pixels(codes), len(prompts), path)

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The averaged target with plain code tables."""
        _, config, tensors = plain(self.average)
        return {"kind": self.kind, **asdict(config)}, tensors


def code_logits(
    model: PromptedTarget, words: Tensor, null: Tensor, codes: Tensor, dtype: torch.dtype
) -> Tensor:
    """words [B, T], null [B], codes [B, length] -> logits [B, length, V] of each code given those before."""
    return model.head(model.forward_sequence(model.prefix(words, null).to(dtype), codes))


def corrupt_codes(codes: Tensor, share: float, vocab: int, generator: torch.Generator) -> Tensor:
    """Codes [B, length], that share of them replaced by random ones."""
    if not share:
        return codes
    other = torch.randint(vocab, codes.shape, generator=generator).to(codes.device)
    replaced = torch.rand(codes.shape, generator=generator).to(codes.device) < share
    return torch.where(replaced, other, codes)


def unigram(codes: Codes, vocab: int) -> float:
    """Nats per validation code under the smoothed frequencies of the training codes: what context must beat."""
    train, val = (
        torch.bincount(split.codes.flatten().long(), minlength=vocab).double()
        for split in (codes.train, codes.val)
    )
    p = (train + 1) / (train + 1).sum()
    return -(val / val.sum() * p.log()).sum().item()
