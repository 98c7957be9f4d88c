"""The flags of other engines: which layout a model gets on which GPUs, what is refused, and what each flag needs."""

import pytest

from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.checkpoint.sizes import stored_bytes
from dsv4cli.engine.config.presets import TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.deployment.cluster import Cluster
from dsv4cli.engine.deployment.flags import ServerSettings
from dsv4cli.engine.deployment.plan import ENGINES, plan_deployment, start_line
from dsv4cli.engine.deployment.served_model import ServedModel
from dsv4cli.engine.inspection.fit import machine
from dsv4cli.engine.inspection.fit.cluster import parse_cluster
from dsv4cli.errors import NotEnoughMemory, UnsupportedHardware, UsageError
from tests.support.other_engines import NVFP4, model_of

FP8 = Formats(experts="fp8")


def planned(engine, preset, gpus, formats=None, tp=None, **settings):
    return plan_deployment(engine, model_of(preset, formats), parse_cluster(gpus), ServerSettings(**settings), tp)


def words(plan, node=0):
    return plan.arguments(node)


@pytest.mark.parametrize(
    ("engine", "preset", "gpus", "tp", "layout"),
    [
        ("vllm", "flash", "8xH100", None, "TP8"),
        ("vllm", "flash", "6xH100", None, "TP4"),
        ("vllm", "flash", "8xH100", 4, "TP4"),
        ("vllm", "flash", "2x8xH200", None, "TP8 x DP2"),
        ("vllm", "pro", "2x8xH200", None, "TP8 x DP2"),
        ("vllm", "pro", "2x8xH200", 8, "TP8 x DP2"),
        ("vllm", "pro", "2x8xH200", 4, "TP4 x DP4"),
        ("sglang", "pro", "2x8xH200", None, "TP16"),
        ("sglang", "pro", "2x8xH200", 8, "TP8 x DP2"),
        ("sglang", "flash", "2x8xH200", None, "TP8 x DP2"),
        ("sglang", "flash", "4x1xB200", None, "TP4"),
    ],
)
def test_a_layout_divides_what_must_be_whole(engine, preset, gpus, tp, layout):
    assert str(planned(engine, preset, gpus, tp=tp).deployment.layout) == layout


@pytest.mark.parametrize(
    ("engine", "preset", "gpus", "tp", "reason", "remedy"),
    [
        ("vllm", "pro", "2x8xH200", 16, "3072 / 16 = 192 rows of an expert", "use --tp 8 on each of the 2 machines"),
        ("vllm", "flash", "2x8xH200", 16, "8 output groups cannot be divided by 16", "use --tp 8"),
        ("vllm", "flash", "8xH100", 3, "64 attention heads and 8 output groups", "use --tp 8"),
        ("vllm", "flash", "4xH100", 8, "it has 4 GPUs", "use --tp 4"),
        ("sglang", "flash", "2x3xB300", 2, "2 machines with 3 GPUs each", "use --tp 1"),
    ],
)
def test_an_impossible_number_of_ranks_names_one_that_works(engine, preset, gpus, tp, reason, remedy):
    with pytest.raises(UsageError, match=reason) as refused:
        planned(engine, preset, gpus, tp=tp)
    assert refused.value.remedy.startswith(remedy)


def test_experts_of_which_no_part_can_be_computed_stay_whole():
    """3072 / 16 is no multiple of 128: Marlin computes a part of an FP8 block of FP4 experts only."""
    fp4, fp8 = (" ".join(words(planned("sglang", "pro", "2x8xB300", one))) for one in (Formats(), FP8))
    assert "--moe-runner-backend marlin" in fp4
    assert "--ep-size" not in fp4
    assert "--ep-size 16" in fp8
    assert "marlin" not in fp8
    flash = " ".join(words(planned("sglang", "flash", "2x8xB300", FP8)))
    assert "--ep-size" not in flash


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("preset", "gpus", "enough"),
    [("flash", "1xH200", "2xH200"), ("flash", "2xH100", "4xH100"), ("pro", "8xH100", "2x8xH100"), ("pro", "1xL20", "")],
)
def test_weights_must_fit(engine, preset, gpus, enough):
    cluster = parse_cluster(gpus)
    if cluster.architecture == "older":
        cluster = Cluster(1, 1, "1GB", 10**9)
    with pytest.raises(NotEnoughMemory) as refused:
        plan_deployment(engine, model_of(preset), cluster, ServerSettings())
    advice = f"use at least {enough}, or " if enough else ""
    assert refused.value.remedy == (
        f"{advice}dsv4's own server, which keeps experts in host memory: dsv4 serve --model {preset}"
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_gpus_before_hopper_are_refused(engine):
    with pytest.raises(UnsupportedHardware, match="A100"):
        planned(engine, "flash", "8xA100")
    # a GPU of unknown kind may be new enough
    assert words(planned(engine, "flash", "8x80GB"))


def test_the_weights_are_those_of_the_table():
    config = parse_config(TINY, "tiny")
    for formats in (Formats(), NVFP4, Formats("bf16", "bf16")):
        model = ServedModel("tiny", "tiny", config, formats)
        specs = expected_tensors(config, formats).values()
        assert model.total_bytes == sum(map(stored_bytes, specs))
        assert model.other_bytes > 0


def test_drafters():
    assert "--spec-method mtp --spec-tokens 2" in " ".join(words(planned("vllm", "flash", "8xH100")))
    assert "--spec-method mtp --spec-tokens 3" in " ".join(words(planned("vllm", "flash", "8xH100", drafts=3)))
    dspark = words(planned("vllm", "flash-0731", "8xH100"))
    assert dspark[dspark.index("--spec-method") + 1] == "dspark"
    assert "--spec-tokens" not in dspark
    off = [words(planned(engine, "flash", "8xH100", drafts=0)) for engine in ENGINES]
    assert not [word for line in off for word in line if "spec" in word]
    steps = " ".join(words(planned("sglang", "flash", "8xH100", drafts=1)))
    assert "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2" in steps
    blocks = " ".join(words(planned("sglang", "flash-0731", "8xH100", drafts=4)))
    assert "--speculative-algorithm DSPARK --speculative-dspark-block-size 4" in blocks


def test_a_drafter_that_an_engine_misreads_is_left_out():
    plan = planned("vllm", "flash", "8xH100", NVFP4)
    assert "--spec-method" not in words(plan)
    assert list(plan.notes()) == [
        "no speculative decoding: the drafter's experts are FP4, and vLLM would read them as NVFP4"
    ]
    with pytest.raises(UsageError, match="no drafter that vLLM"):
        planned("vllm", "flash", "8xH100", NVFP4, drafts=2)
    all_nvfp4 = planned("sglang", "flash", "8xH100", Formats(experts="nvfp4"))
    assert "--speculative-algorithm" not in words(all_nvfp4)
    assert "NVFP4" in next(all_nvfp4.notes())
    assert "--spec-method" in words(planned("vllm", "flash", "8xH100", Formats(experts="nvfp4")))


def test_nvfp4_needs_marlin_on_hopper_only():
    for gpus, kernels in (("8xH100", ["marlin"]), ("8xB200", []), ("8x180GB", [])):
        line = words(planned("sglang", "flash", gpus, NVFP4))
        assert line[line.index("--moe-runner-backend") + 1 :][:1] == kernels if kernels else "marlin" not in line


def test_the_memory_fraction_is_raised_where_weights_fill_the_gpus():
    assert "--mem-fraction-static 0.88" in " ".join(words(planned("sglang", "pro", "8xH200")))
    assert "--mem-fraction-static" not in words(planned("sglang", "flash", "8xH200"))


def test_settings_reach_the_machine_with_the_api():
    settings = {"host": "0.0.0.0", "port": 9000, "names": ("a", "b"), "context": 5000, "head": "10.0.0.7"}
    vllm, sglang = (planned(engine, "pro", "2x8xH200", **settings) for engine in ENGINES)
    head, other = " ".join(words(vllm)), " ".join(words(vllm, 1))
    for part in ("--served-model-name a b ", "--host 0.0.0.0 --port 9000"):
        assert part in head
        assert part not in other
    assert "--max-model-len 5000" in head
    assert "--master-addr 10.0.0.7 --master-port 29501 --headless" in other
    assert "--headless" not in head
    assert "--served-model-name a --" in " ".join(words(sglang))
    assert "--context-length 5000" in " ".join(words(sglang, 1))
    assert "--node-rank 1 --dist-init-addr 10.0.0.7:29501" in " ".join(words(sglang, 1))
    assert list(sglang.notes()) == ["SGLang has one model name: clients must use a"]


def test_replicas_with_dspark_need_a_parallel_head():
    assert "--enable-dp-lm-head" in words(planned("sglang", "flash-0731", "2x8xH200"))
    assert "--enable-dp-lm-head" not in words(planned("sglang", "flash-0731", "8xH200"))
    assert "--enable-dp-lm-head" not in words(planned("sglang", "flash", "2x8xH200"))


def test_notes_on_gpus_and_folders():
    assert list(planned("vllm", "flash", "6xH100").notes()) == ["2 of the 6 GPUs are not used: TP4"]
    local = ServedModel("/models/v4", "v4", model_of("flash").config, Formats(), local=True)
    plan = plan_deployment("vllm", local, parse_cluster("2x8xH200"), ServerSettings())
    assert list(plan.notes()) == ["each machine needs the folder /models/v4"]


def test_the_record_has_every_reason():
    record = planned("sglang", "pro", "2x8xH200").record()
    assert record.keys() == {
        "engine", "gpus", "tensor_parallel", "data_parallel", "weights_per_gpu", "commands", "reasons", "notes",
    }  # fmt: skip
    assert (record["gpus"], record["tensor_parallel"], record["data_parallel"]) == ("2x8xH200", 16, 1)
    assert len(record["commands"]) == 2
    assert {word for word in record["commands"][0].split() if word.startswith("--")} <= {
        *record["reasons"], "--model-path",
    }  # fmt: skip
    assert "SGLANG_SHARED_EXPERT_TP1" in record["reasons"]


def test_a_shell_reads_the_words_of_a_name():
    model = ServedModel("a b", "$x", model_of("flash").config, Formats(), local=True)
    line = plan_deployment("vllm", model, parse_cluster("8xH100"), ServerSettings()).shell_line(keys='"$(cat k)"')
    assert "vllm serve 'a b' --tool" in line
    assert "--served-model-name '$x' " in line
    assert line.endswith('--api-key "$(cat k)"')
    assert start_line("sglang", "a b", 4, "main").endswith("--tp-size 4 --revision main")


@pytest.mark.parametrize(
    ("text", "nodes", "cluster"),
    [
        ("8xH200", None, Cluster(1, 8, "H200", 143771 << 20, "hopper")),
        ("2x8xh200", None, Cluster(2, 8, "H200", 143771 << 20, "hopper")),
        ("8xH200", 3, Cluster(3, 8, "H200", 143771 << 20, "hopper")),
        ("2x8x80GB", 2, Cluster(2, 8, "80GB", 80 << 30, None)),
        ("B200", None, Cluster(1, 1, "B200", 183359 << 20, "blackwell")),
        ("2xL40S", None, Cluster(1, 2, "L40S", 46068 << 20, "older")),
    ],
)
def test_clusters_by_name(text, nodes, cluster):
    assert parse_cluster(text, nodes) == cluster
    assert parse_cluster(str(cluster)) == cluster


@pytest.mark.parametrize(
    ("text", "nodes", "complaint"),
    [
        ("2x8xH200", 3, "--nodes 3 contradicts"),
        ("8xH200,8xH100", None, "several kinds"),
        ("0x8xH200", None, "none"),
        ("2x8xwolf", None, "--gpus cannot be"),
        (None, None, "no GPU"),
    ],
)
def test_other_names_are_refused(text, nodes, complaint, monkeypatch):
    monkeypatch.setattr(machine, "_rows", list)
    with pytest.raises(UsageError, match=complaint):
        parse_cluster(text, nodes)


def test_gpus_of_this_machine(monkeypatch):
    row = ["NVIDIA H100 80GB HBM3", " 81559", " 81000", " 9.0"]
    monkeypatch.setattr(machine, "_rows", lambda: [row, row])
    assert parse_cluster(None, 2) == Cluster(2, 2, "H100", 81559 << 20, "hopper")
