"""The plan of a run equals measurements of a tiny run and published figures of the large ones."""

from pathlib import Path

import pytest
import torch

from infoxlm_core import run_file
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.shards import open_shards
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.model.encoder import Encoder, EncoderSize
from infoxlm_core.systems.infoxlm import plan
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.systems.infoxlm.system import build
from infoxlm_core.training.optimizer import make_adamw
from infoxlm_core.training.state import named_tensors
from tests.toys.pretraining import VOCABULARY, tiny_config

ROOT = Path(__file__).parents[4]
XLMR_VOCABULARY = 250_002


def load_config(name: str) -> PretrainingConfig:
    return run_file.load(ROOT / f"configs/{name}.yaml").pretraining


def values_by_name(rows: list[plan.PlanRow]) -> dict[str, float]:
    return {row.name: row.value for row in rows}


def count_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_planned_bytes_of_weights_optimizer_key_encoder_and_queue_are_exact(tiny_shards):
    config = tiny_config(optimization={"warmup_steps": 0})
    shards = open_shards(tiny_shards)
    model = build(config, shards)
    learner = InfoXLMLearner(config, model, shards)
    optimizer = make_adamw(model.parameters(), config.optimization)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    queue = learner.xlco.queue
    checkpoint = named_tensors(learner, optimizer)

    memory = values_by_name(plan.plan_memory(config, VOCABULARY, gpu_count=1))
    run = values_by_name(plan.plan(config, VOCABULARY, gpu_count=1)["run"])

    assert memory["weights"] == count_bytes(model.parameters())
    assert memory["gradients"] == count_bytes(parameter.grad for parameter in model.parameters())
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert memory["AdamW moments"] == count_bytes(moments)
    assert memory["key encoder"] == count_bytes(learner.xlco.key_encoder.parameters())
    assert memory["queue"] == count_bytes([queue.rows, queue.sentence_ids, queue.added_at_step])
    assert run["checkpoint"] == count_bytes(checkpoint.values()) - queue.pointer.element_size()


def test_bf16_weights_include_copies_of_the_key_encoder(tiny_shards):
    config = tiny_config()
    shards = open_shards(tiny_shards)
    key_encoder = InfoXLMLearner(config, build(config, shards), shards).xlco.key_encoder
    with torch.autocast("cpu", torch.bfloat16):
        key_encoder(torch.full((4,), 5), torch.arange(4), (4,))

    planned_bytes = {}
    for weight in (0.0, 1.0):
        rows = plan.plan_memory(tiny_config(objectives={"xlco": weight}), VOCABULARY, gpu_count=1)
        planned_bytes[weight] = values_by_name(rows)["bf16 weights"]

    assert planned_bytes[1.0] - planned_bytes[0.0] == count_bytes(key_encoder.buffers()) > 0


def test_a_layer_stores_the_planned_bytes_for_each_token():
    d, tokens, lengths = 128, 1536, (48,) * 32
    encoder = Encoder(EncoderSize(VOCABULARY, layers=2, hidden=d, ffn=4 * d, heads=2, positions=50))
    matrices = [parameter for parameter in encoder.parameters() if parameter.dim() == 2]
    weight_shapes = {parameter.shape for parameter in encoder.parameters()} | {matrix.T.shape for matrix in matrices}
    stored_bytes = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape not in weight_shapes:
            storage = tensor.untyped_storage()
            stored_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def measure_bytes() -> float:
        """Return the bytes stored for the backward pass per token, layer and unit of d."""
        stored_bytes.clear()
        hidden = torch.randn(tokens, d, requires_grad=True)
        hooks = torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16), hooks:
            output = encoder.run_layers(hidden, lengths, 0, 2)
        assert output.requires_grad
        return sum(stored_bytes.values()) / (tokens * 2 * d)

    assert measure_bytes() == pytest.approx(plan.ACTIVATION_BYTES, rel=0.02)
    encoder.recompute = True
    assert measure_bytes() == 2


@pytest.mark.parametrize(("name", "exported", "hidden"), [("base", 278_295_186, 768), ("large", 560_142_482, 1024)])
def test_parameters_are_those_of_xlmr_and_the_projection(name, exported, hidden):
    parameters = values_by_name(plan.plan(load_config(name), XLMR_VOCABULARY)["parameters"])

    assert parameters["exported"] == exported
    assert parameters["contrast projection"] == hidden**2
    assert parameters["encoder"] + parameters["masked-LM head"] == exported - hidden


@pytest.mark.parametrize(("name", "long", "short"), [("base", 1.674, 0.645 * 1.507), ("large", 4.926, 1.904 * 1.507)])
def test_flops_of_a_step_of_the_paper_follow_the_formula(name, long, short):
    config = load_config(name)
    size = plan.size_of(config, XLMR_VOCABULARY)

    long_flops, short_flops = (plan.count_step_flops(config, size, shape) for shape in (plan.LONG, plan.SHORT))

    assert long_flops / 1e15 == pytest.approx(long, abs=5e-4)
    assert short_flops / 1e15 == pytest.approx(short, rel=2e-3)


@pytest.mark.parametrize(("compiled", "mfu"), [(True, 0.4), (False, 0.25)])
def test_hours_of_a_run_are_its_flops_at_the_assumed_utilisation(compiled, mfu):
    config = load_config("base")
    config = config.model_copy(update={"model": config.model.model_copy(update={"compiled": compiled})})

    run = values_by_name(plan.plan(config, XLMR_VOCABULARY, gpu_count=8)["run"])

    assert run["long sequences"] == pytest.approx(150_000 * 1.674e15 / (mfu * 8 * 989e12) / 3600, rel=1e-3)


def test_tokens_queue_turnover_and_all_reduce_of_a_step():
    config = load_config("base")
    steps = values_by_name(plan.plan(config, XLMR_VOCABULARY, gpu_count=8)["steps"])

    assert steps["long sequences"] == 2048 * (512 + 512 + 2 * 128)
    assert steps["queue turnover"] == 64
    assert steps["all-reduce"] == 4 * (278_295_186 - 768 + 768**2)
    assert values_by_name(plan.plan(config, XLMR_VOCABULARY, gpu_count=1)["steps"])["all-reduce"] == 0


def test_plan_is_printed_with_units():
    lines = "\n".join(plan.describe(plan.plan(load_config("base15"), XLMR_VOCABULARY, 8, "h100")))

    assert "278,295,186" in lines
    assert "1.674 PFLOP" in lines
    assert "64.0 steps" in lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_type": "abacus"}, "gpu 'abacus' is not known: give one of A100, B200, H100"),
        ({"gpu_count": 0}, r"gpus 0: give 1 to 256 \(pretraining\.batches\.virtual_shards\)"),
        ({"gpu_count": 257}, "gpus 257: give 1 to 256"),
    ],
)
def test_unknown_gpu_or_impossible_number_of_gpus_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        plan.plan(load_config("base"), XLMR_VOCABULARY, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"contrast": {"queue_size": 10**12}},
            r"of which queue 3,096,000\.0 GB, .*: lower pretraining\.contrast\.queue_size",
        ),
        ({"model": {"hidden": 2**17, "heads": 8, "layers": 1000}}, r"moments .* GB, .*: lower pretraining\.model"),
    ],
)
def test_run_that_no_memory_can_hold_is_refused_before_anything_is_allocated(changes, message):
    config = PretrainingConfig.parse(changes)

    with pytest.raises(ConfigError, match=message):
        plan.check_memory(config, EncoderSize.from_config(config.model, XLMR_VOCABULARY), 256e9)
