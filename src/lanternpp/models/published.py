"""Published models that can be read: the options for each, the size of its download, and a drafter that fits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """A model of the hub. Sizes are computed from numbers of parameters: 2 bytes each, 2 to 4 in a .pt."""

    name: str
    model: str  # what --model takes
    download: str
    drafter: str | None = None  # what --drafter takes; None: none is published
    needs: str = ""  # what else has to be given


T5 = "flan-t5-xl for texts, fetched at the first one (about 11 GB)"
C2I, T2I = "peizesun/llamagen_c2i", "peizesun/llamagen_t2i"
PUBLISHED = (
    Published("LlamaGen-B, ImageNet classes, 256 px", f"{C2I}/c2i_B_256.pt", "0.2 to 0.4 GB"),
    Published("LlamaGen-L, ImageNet classes, 384 px", f"{C2I}/c2i_L_384.pt", "0.7 to 1.4 GB"),
    Published("LlamaGen-XL, ImageNet classes, 384 px", f"{C2I}/c2i_XL_384.pt", "1.6 to 3.1 GB"),
    Published("LlamaGen-XXL, ImageNet classes, 384 px", f"{C2I}/c2i_XXL_384.pt", "2.8 to 5.6 GB"),
    Published("LlamaGen-3B, ImageNet classes, 384 px", f"{C2I}/c2i_3B_384.pt", "6.2 to 12.4 GB"),
    Published(
        "LlamaGen-XL, texts, 256 px",
        f"{T2I}/t2i_XL_stage1_256.pt",
        "1.6 to 3.1 GB",
        "jadohu/llamagen_drafter",
        T5,
    ),
    Published(
        "LlamaGen-XL, texts, 512 px",
        f"{T2I}/t2i_XL_stage2_512.pt",
        "1.6 to 3.1 GB",
        "jadohu/llamagen2_drafter",
        T5,
    ),
    Published("Anole-7B", "leloy/Anole-7b-v0.1-hf", "about 14 GB", "jadohu/anole_drafter"),
    Published(
        "Lumina-mGPT-7B, 768 px",
        "Alpha-VLLM/Lumina-mGPT-7B-768",
        "about 14 GB",
        needs="Chameleon's vqgan.ckpt: lanternpp models convert MODEL OUT --vq vqgan.ckpt",
    ),
    Published("Janus-Pro-1B", "deepseek-community/Janus-Pro-1B", "about 4 GB"),
    Published("Janus-Pro-7B", "deepseek-community/Janus-Pro-7B", "about 15 GB"),
    Published("Emu3-Gen, 8B", "BAAI/Emu3-Gen-hf", "about 17 GB"),
)
