"""The GGUF models of a repository by their file names, and which of them a name selects."""

import pytest

from dsv4cli.engine.checkpoint.gguf.variants import ChoiceNeeded, Variant, choose_variant, variants_of
from dsv4cli.errors import CheckpointError, UsageError

BASE = "DeepSeek-V4-Flash-0731"


def parts(stem: str, count: int) -> list[str]:
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


# as the publishers name their files
UNSLOTH = [
    *parts(f"UD-Q4_K_XL/{BASE}-UD-Q4_K_XL", 4), *parts(f"UD-Q2_K_XL/{BASE}-UD-Q2_K_XL", 3),
    *parts(f"Q8_0/{BASE}-Q8_0", 6), *parts(f"BF16/{BASE}-BF16", 12), f"{BASE}-UD-IQ1_S.gguf",
    f"{BASE}-MXFP4_MOE.gguf", "imatrix_unsloth.gguf", "README.md", "config.json",
]  # fmt: skip
AUTHOR = f"deepseek-ai_{BASE}"
BARTOWSKI = [
    *parts(f"{AUTHOR}-Q4_K_M/{AUTHOR}-Q4_K_M", 4), *parts(f"{AUTHOR}-Q2_K_L/{AUTHOR}-Q2_K_L", 2),
    f"{AUTHOR}-Q2_K.gguf", f"{AUTHOR}-IQ2_XXS.gguf", f"{AUTHOR}-imatrix.gguf", f"mmproj-{AUTHOR}-F16.gguf",
]  # fmt: skip
DS4 = [
    "DeepSeek-V4-Flash-IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8-chat-v2-imatrix-0731.gguf",
    "DeepSeek-V4-Flash-Q4KExperts-F16HC-F16Compressor-F16Indexer-Q8Attn-Q8Shared-Q8Out-chat-v2.gguf",
    "DeepSeek-V4-Flash-MTP-Q4K-Q8_0-F32.gguf",
]
OTHERS = [
    f"{BASE}-MXFP4_MOE-Q8_0.gguf", f"{BASE}-MXFP4_MOE-BF16.gguf", f"{BASE}-DSpark.gguf", f"mtp-{BASE}-Q8_0.gguf",
    f"{BASE}.i1-Q4_K_S.gguf", "plain.gguf", f"{BASE}-Q6_K-MTP.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (UNSLOTH, ["BF16", "MXFP4_MOE", "UD-IQ1_S", "Q8_0", "UD-Q2_K_XL", "UD-Q4_K_XL"]),
        (BARTOWSKI, ["IQ2_XXS", "Q2_K", "Q2_K_L", "Q4_K_M"]),
        (DS4, [
            "IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8-chat-v2-imatrix-0731",
            "Q4KExperts-F16HC-F16Compressor-F16Indexer-Q8Attn-Q8Shared-Q8Out-chat-v2",
        ]),
        (OTHERS, ["MXFP4_MOE-BF16", "MXFP4_MOE-Q8_0", "Q6_K-MTP", "i1-Q4_K_S", "plain"]),
        (["a/model.gguf", "b/model.gguf"], ["a", "b"]),
        (["a/m-Q8_0.gguf", "b/m-q8_0.gguf", "m-Q4_0.gguf"], ["a/m-Q8_0", "b/m-q8_0", "Q4_0"]),
        (["README.md", "model.safetensors"], []),
    ],
    ids=["unsloth", "bartowski", "ds4", "others", "folders", "alike", "none"],
)  # fmt: skip
def test_models_are_named_by_their_quantization(files, names):
    found = variants_of(reversed(files))
    assert sorted(one.name for one in found) == sorted(names)
    assert {file for one in found for file in one.files} <= {*files}
    assert all(one.missing == () for one in found)


@pytest.mark.parametrize(
    ("files", "wanted", "first"),
    [
        (UNSLOTH, "UD-Q4_K_XL", f"UD-Q4_K_XL/{BASE}-UD-Q4_K_XL-00001-of-00004.gguf"),
        (UNSLOTH, "ud-q4_k_xl", f"UD-Q4_K_XL/{BASE}-UD-Q4_K_XL-00001-of-00004.gguf"),
        (UNSLOTH, "Q4_K_XL", f"UD-Q4_K_XL/{BASE}-UD-Q4_K_XL-00001-of-00004.gguf"),
        (UNSLOTH, f"{BASE}-UD-IQ1_S.gguf", f"{BASE}-UD-IQ1_S.gguf"),
        (UNSLOTH, f"Q8_0/{BASE}-Q8_0-00001-of-00006.gguf", f"Q8_0/{BASE}-Q8_0-00001-of-00006.gguf"),
        (BARTOWSKI, "q4_k_m", f"{AUTHOR}-Q4_K_M/{AUTHOR}-Q4_K_M-00001-of-00004.gguf"),
        (BARTOWSKI, f"{AUTHOR}-Q2_K_L", f"{AUTHOR}-Q2_K_L/{AUTHOR}-Q2_K_L-00001-of-00002.gguf"),
        # the exact name, although Q2_K_L begins with it
        (BARTOWSKI, "Q2_K", f"{AUTHOR}-Q2_K.gguf"),
        (DS4, "iq2xxs", DS4[0]),
        (DS4, "Q4KExperts", DS4[1]),
        (OTHERS, "Q4_K_S", f"{BASE}.i1-Q4_K_S.gguf"),
    ],
)  # fmt: skip
def test_a_name_selects_one_model_with_all_its_files(files, wanted, first):
    found = choose_variant(variants_of(files), wanted, "org/name")
    assert found.files[0] == first
    assert len(found.files) == (int(first[-10:-5]) if "-of-" in first else 1)


@pytest.mark.parametrize(
    ("files", "wanted", "words"),
    [
        (UNSLOTH, "Q3_K_M", ["'Q3_K_M' names no GGUF model of org/name", "org/name:NAME", "UD-Q4_K_XL", "BF16"]),
        # the beginning of a name selects nothing: Q4 could be any of them
        (UNSLOTH, "Q4", ["names no GGUF model"]),
        (UNSLOTH, "Q4_K", ["names no GGUF model"]),
        (BARTOWSKI[:-3], "Q2", ["names no GGUF model"]),
        (BARTOWSKI, "imatrix", ["names no GGUF model"]),
        (DS4, "chat", ["'chat' names several GGUF models of org/name", "IQ2XXS-", "Q4KExperts-"]),
        (OTHERS, "MXFP4_MOE", ["names several GGUF models", "MXFP4_MOE-BF16", "MXFP4_MOE-Q8_0"]),
        (OTHERS, "(", ["names no GGUF model"]),
        ([], "Q8_0", ["names no GGUF model", "holds no GGUF model"]),
    ],
)
def test_an_unknown_or_ambiguous_name_is_refused_with_the_list(files, wanted, words):
    with pytest.raises(UsageError) as caught:
        choose_variant(variants_of(files), wanted, "org/name")
    assert not isinstance(caught.value, ChoiceNeeded)
    text = f"{caught.value.message} → {caught.value.remedy}"
    assert [word for word in words if word not in text] == []


def test_a_long_list_is_cut():
    variants = [Variant(f"v{number}", (f"v{number}.gguf",)) for number in range(60)]
    with pytest.raises(UsageError) as caught:
        choose_variant(variants, "none", "org/name")
    assert caught.value.remedy.endswith("v39 and 20 more")


def test_a_model_without_all_its_files_is_refused():
    files = parts("Q8_0/m-Q8_0", 4)
    found = variants_of(files[:1] + files[3:])
    assert found[0].missing == tuple(files[1:3])
    with pytest.raises(CheckpointError, match=f"org/name lacks {files[1]} and 1 more files of Q8_0"):
        choose_variant(found, "q8_0", "org/name")
