"""Rows of a table of steps: Med-DDPM's few multistep steps, and students of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.factories import analytic
from voxtune.diffusion import SAMPLERS, TIMESTEP_SPACINGS
from voxtune.errors import InputError
from voxtune.evaluation.step_search import TableOptions, _candidates, step_table
from voxtune.evaluation.steps import StepsRequest, _confirmable, _students
from voxtune.quality.bootstrap import Bootstrap
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import Distilled, SamplingConfig
from voxtune.runtime.storage import save

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = TableOptions(batch=8, margin=1.5, bootstrap=Bootstrap(resamples=60))


def student(timesteps=(23, 15, 8, 3), sha256="0" * 64) -> Model:
    """The analytic model with the settings of a student."""
    model = analytic.model()
    distilled = Distilled(
        sampler="ddim",
        steps=len(timesteps),
        timesteps=timesteps,
        teacher="teacher",
        teacher_sha256=sha256,
        teacher_steps=24,
    )
    return Model(replace(model.config, sampling=SamplingConfig(distilled=distilled)), model.network)


def test_ten_steps_of_ipndm_are_among_the_candidates():
    candidates = _candidates(analytic.model(), tuple(SAMPLERS), None, tuple(TIMESTEP_SPACINGS))
    assert [(c.sampler, c.steps) for c in candidates].count(("ipndm", 10)) == 1


@pytest.mark.slow
def test_a_student_is_a_row_and_never_the_choice():
    result = step_table(
        analytic.model(),
        analytic.subjects(16),
        analytic.segmenter(),
        samplers=("ddpm",),
        steps=(2, 24),
        timestep_spacings=("trailing",),
        students=[student(tuple(range(23, -1, -1)))],
        options=QUICK,
    )
    row = result.rows[-1]
    assert row.name == "distilled ddim 24" and row.record["distilled_from"]["model"] == "teacher"
    assert row.compared and result.chosen != row.name
    assert row.to_json()["timesteps"] == list(range(23, -1, -1))
    # It equals the choice but for its weights, and is not what a second table confirms.
    chosen = {**row.to_json(), "steps": 2, "verdict": "non-inferior"}
    assert not _confirmable(chosen, {**row.to_json(), "verdict": "non-inferior"})


def test_a_student_of_other_weights_is_refused(tmp_path):
    model = Model(student().config)
    save(model, tmp_path / "student", card="")
    request = StepsRequest(model=tmp_path / "teacher", out=tmp_path / "out", distilled=tmp_path / "student")
    assert len(_students(request, "0" * 64, print)) == 1
    with pytest.raises(InputError, match="was distilled from other weights"):
        _students(request, "1" * 64, print)
    save(Model(analytic.model().config), tmp_path / "plain", card="")
    with pytest.raises(InputError, match="is not a distilled model"):
        _students(replace(request, distilled=tmp_path / "plain"), "0" * 64, print)
    with pytest.raises(InputError, match="--distilled cannot be combined with --numerics"):
        replace(request, numerics=True)
    assert torch.equal(
        next(iter(_students(request, "0" * 64, print)[0].network.parameters())), next(iter(model.network.parameters()))
    )
