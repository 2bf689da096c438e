"""Placement on the model's grid and back: exact for padding in every orientation, centred for resampling."""

from __future__ import annotations

import json
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories.contracts import WHOLE_HEAD
from tests.factories.nifti import (
    ORIENTATIONS,
    oblique_affine,
    oriented_affine,
    rotations,
    save,
    shapes,
    spacings,
    volume,
)
from voxtune.data.contract import Label, generic_contract
from voxtune.data.grid import fit
from voxtune.data.nifti import read_labels, write_volume
from voxtune.data.preflight import MODEL, NEW_HEAD, NEW_MODEL
from voxtune.errors import InputError, command_options

UNIT = generic_contract(3, 1, (8, 8, 8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("grid")


def random_labels(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 4, shape)


@settings(max_examples=150, deadline=None)
@given(
    shapes,
    st.tuples(*[st.integers(9, 14)] * 3),
    st.sampled_from(ORIENTATIONS),
    st.sampled_from(ORIENTATIONS),
    st.integers(0, 99),
)
def test_padding_round_trip_is_exact(shape, size, source, target, seed):
    labels = random_labels(shape, seed)
    placement = fit(volume(labels, oriented_affine(source)), generic_contract(3, 1, size, orientation=target))
    on_model = placement.apply(labels, label=True)
    assert placement.mode == "pad" and on_model.shape == size
    assert np.array_equal(np.bincount(on_model.ravel())[1:], np.bincount(labels.ravel())[1:])
    assert np.array_equal(placement.invert(on_model, label=True), labels)
    image = np.random.default_rng(seed).random(shape).astype(np.float32)
    assert np.array_equal(placement.invert(placement.apply(image, label=False), label=False), image)


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(*[st.integers(6, 20)] * 3),
    st.tuples(*[st.integers(5, 9)] * 3),
    st.sampled_from(ORIENTATIONS),
    st.data(),
)
def test_cropping_keeps_every_labelled_voxel(shape, size, source, data):
    labels = np.zeros(shape, np.int32)
    start = [data.draw(st.integers(0, n - 4)) for n in shape]
    labels[tuple(slice(s, s + 4) for s in start)] = random_labels((4, 4, 4)) | 1
    placement = fit(volume(labels, oriented_affine(source)), generic_contract(3, 1, size))
    assert np.array_equal(placement.invert(placement.apply(labels, label=True), label=True), labels)


@pytest.mark.parametrize("source", ORIENTATIONS)
def test_axes_follow_the_orientation_of_the_contract(source):
    """A voxel keeps its world coordinates on (D, H, W) = (S, A, R)."""
    labels = np.zeros((4, 5, 6), np.int32)
    labels[1, 0, 4] = 1
    affine = oriented_affine(source)
    placement = fit(volume(labels, affine), generic_contract(1, 1, (7, 7, 7)))
    d, h, w = np.argwhere(placement.apply(labels, label=True))[0]
    assert np.allclose(placement.model_affine @ [w, h, d, 1], affine @ [1, 0, 4, 1])
    assert nib.aff2axcodes(placement.model_affine) == ("R", "A", "S")


def test_orientation_agrees_with_nibabel():
    labels = random_labels((4, 5, 6))
    affine = oriented_affine("PIR")
    canonical = nib.as_closest_canonical(nib.Nifti1Image(labels.astype(np.int16), affine))
    size = canonical.shape[::-1]
    placed = fit(volume(labels, affine), generic_contract(3, 1, size)).apply(labels, label=True)
    assert np.array_equal(placed, np.asanyarray(canonical.dataobj).transpose(2, 1, 0))


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.integers(8, 16)] * 3), spacings, st.sampled_from(ORIENTATIONS), st.sampled_from(ORIENTATIONS))
def test_resampling_reproduces_a_linear_ramp(shape, spacing, source, target):
    """A ramp in world coordinates is the same ramp on the model's grid."""
    affine = oriented_affine(source, spacing)
    ramp = world_ramp(affine, shape)
    contract = generic_contract(1, 1, (40, 40, 40), spacing=(1.7, 1.3, 1.1), orientation=target)
    placement = fit(volume(ramp, affine), contract, mode="resample", label=False)
    placed = placement.apply(ramp, label=False, fill=np.nan)
    expected = world_ramp(placement.model_affine, placement.size[::-1]).transpose(2, 1, 0)
    inner = inside(placement)
    assert np.abs(placed - expected)[inner].max(initial=0.0) < 1e-3
    assert np.isnan(placed).any()


def world_ramp(affine, shape):
    grid = np.stack([*np.meshgrid(*[np.arange(n) for n in shape], indexing="ij"), np.ones(shape)], axis=-1)
    return ((grid @ affine.T)[..., :3] @ [1.0, 0.5, -0.25]).astype(np.float32)


def inside(placement):
    """Model voxels whose centres are between the centres of source voxels, where linear interpolation is exact."""
    axes = []
    for i, n in enumerate(placement.size[::-1]):
        at = placement.origin[i] + placement.scale[i] * np.arange(n)
        axes.append((at >= 0) & (at <= placement.shape[placement.axes[i]] - 1))
    x, y, z = axes
    return z[:, None, None] & y[None, :, None] & x[None, None, :]


@pytest.mark.parametrize(("n", "spacing"), [(8, 2.0), (9, 2.0), (10, 0.5), (7, 3.0)])
def test_resampled_field_of_view_keeps_its_centre(n, spacing):
    affine = np.diag([spacing] * 3 + [1.0])
    size = (round(n * spacing),) * 3
    placement = fit(volume(np.ones((n, n, n)), affine), generic_contract(1, 1, size), label=False)
    assert placement.mode == "resample"
    middle = placement.model_affine @ [*((k - 1) / 2 for k in size), 1]
    assert np.allclose(middle, affine @ [*[(n - 1) / 2] * 3, 1])


def test_doubling_and_halving_labels_is_exact():
    labels = random_labels((5, 6, 7))
    placement = fit(volume(labels, np.diag([2.0, 2.0, 2.0, 1.0])), generic_contract(3, 1, (14, 12, 10)))
    big = placement.apply(labels, label=True)
    assert np.array_equal(big.transpose(2, 1, 0), labels.repeat(2, 0).repeat(2, 1).repeat(2, 2))
    assert np.array_equal(placement.invert(big, label=True), labels)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.5, 3.0), st.sampled_from(ORIENTATIONS))
def test_resampling_a_ball_and_back_stays_close(spacing, source):
    """Labels resampled to another spacing and back change only at their surface."""
    shape = tuple(int(30 / spacing) + i for i in range(3))
    affine = oriented_affine(source, (spacing,) * 3)
    centre = (np.array(shape) - 1) / 2
    ball = (((np.indices(shape).T - centre) ** 2).sum(-1).T * spacing**2 < 10**2).astype(np.int32)
    placement = fit(volume(ball, affine), generic_contract(1, 1, (48, 48, 48), spacing=(0.8,) * 3), mode="resample")
    back = placement.invert(placement.apply(ball, label=True), label=True)
    assert 2 * (back & ball).sum() / (back.sum() + ball.sum()) > 0.93


def test_choice_and_reason_are_reported():
    same = fit(volume(np.ones((8, 8, 8)), np.diag([1.505, 1.5, 1.5, 1])), WHOLE_HEAD)
    other = fit(volume(np.ones((8, 8, 8)), np.diag([-1.0, 1.5, 1.5, 1])), WHOLE_HEAD)
    forced = fit(volume(np.ones((8, 8, 8))), WHOLE_HEAD, mode="pad")
    assert same.mode == "pad" and "matches" in same.describe()
    assert other.mode == "resample" and "differs" in other.describe() and "LAS to RAS" in other.describe()
    assert forced.mode == "pad" and "requested" in forced.reason and "\n" not in forced.describe()
    assert json.loads(json.dumps(same.to_dict()))["mode"] == "pad"


# One long axis, since rounding errors grow with the number of voxels.
sizes = st.tuples(st.integers(4, 400), st.integers(4, 9), st.integers(4, 9)).flatmap(st.permutations).map(tuple)
oblique_cases = (
    sizes,
    st.tuples(*[st.sampled_from([0.7, 0.9375, 1.0, 1.5, 2.0, 3.0, 4.5]) | st.floats(0.4, 6.0)] * 3),
    st.sampled_from(ORIENTATIONS),
    rotations,
)


@settings(max_examples=120, deadline=None)
@given(
    *oblique_cases,
    st.sampled_from(ORIENTATIONS),
    st.sampled_from([(1, 1), (2, 0), (0, 1)]),
    st.sampled_from(["auto", "pad", "resample"]),
)
def test_a_mask_on_the_model_spacing_is_never_refused_by_rounding(
    folder, size, spacing, code, degrees, target, codes, mode
):
    """The labels fill the model's grid, whatever the float32 header makes of the spacing."""
    shape, affine, contract = on_grid(size, spacing, code, degrees, target)
    labels = random_labels(shape).astype(np.uint8) | 1
    mask = read_labels(save(folder / "oblique.nii", labels, affine, sform=codes[0], qform=codes[1]))
    placement = fit(mask, contract, mode)
    on_model = placement.apply(mask.array, label=True)
    assert placement.mode == ("resample" if mode == "resample" else "pad")
    assert on_model.all() and np.array_equal(placement.invert(on_model, label=True), labels)


@settings(max_examples=60, deadline=None)
@given(*oblique_cases, st.sampled_from([0.5, 2.0, 3.0]), st.sampled_from(["auto", "resample"]))
def test_a_field_of_view_of_the_model_size_fits_at_any_spacing(folder, size, spacing, code, degrees, factor, mode):
    shape, affine, contract = on_grid(size, spacing, code, degrees, "RAS")
    if factor > 1:  # finer voxels, more of them
        shape, affine = tuple(int(n * factor) for n in shape), affine @ np.diag([1 / factor] * 3 + [1])
    else:
        contract = generic_contract(
            3, 1, tuple(int(n / factor) for n in contract.size), spacing=tuple(s * factor for s in contract.spacing)
        )
    mask = read_labels(save(folder / "fine.nii", np.ones(shape, np.uint8), affine))
    placement = fit(mask, contract, mode)
    assert placement.mode == "resample" and placement.apply(mask.array, label=True).all()
    assert placement.invert(np.ones(contract.size, np.float32), label=False).all()


def on_grid(size, spacing, code, degrees, target):
    """(shape, affine, contract): a volume whose voxels are those of the contract's grid in another axis order."""
    contract = generic_contract(3, 1, size, spacing=spacing, orientation=target)
    shape, voxel = [0] * 3, [0.0] * 3
    for letter, n, mm in zip(target, size[::-1], spacing[::-1], strict=True):
        pair = next(pair for pair in ("RL", "AP", "SI") if letter in pair)
        axis = next(i for i, own in enumerate(code) if own in pair)
        shape[axis], voxel[axis] = n, mm
    return tuple(shape), oblique_affine(code, voxel, degrees), contract


@settings(max_examples=80, deadline=None)
@given(shapes, spacings, st.sampled_from(ORIENTATIONS), rotations, st.sampled_from([(1, 1), (2, 0), (0, 1), (4, 2)]))
def test_an_oblique_mask_padded_and_written_back_is_the_same_file(folder, shape, spacing, code, degrees, codes):
    labels = random_labels(shape).astype(np.uint8)
    affine = oblique_affine(code, spacing, degrees)
    mask = read_labels(save(folder / "in.nii", labels, affine, sform=codes[0], qform=codes[1]))
    placement = fit(mask, generic_contract(3, 1, (10, 11, 12)), "pad")
    back = placement.invert(placement.apply(mask.array, label=True), label=True)
    assert np.array_equal(back, labels)
    source, written = (
        nib.load(folder / "in.nii"),
        nib.load(write_volume(folder / "out.nii", back, mask, overwrite=True)),
    )
    assert np.array_equal(written.affine, source.affine) and np.array_equal(written.affine, mask.affine)
    for form in ("get_qform", "get_sform"):
        (was, was_code), (now, now_code) = (getattr(i, form)(coded=True) for i in (source, written))
        assert was_code == now_code and (was is None or np.array_equal(was, now))
    assert np.array_equal(np.asanyarray(written.dataobj), labels)


@pytest.mark.parametrize("degrees", range(1, 31))
def test_oblique_masks_of_twice_the_model_resolution(folder, degrees):
    affine = oblique_affine("RAS", (1.5, 1.5, 1.5), (0, 0, degrees))
    mask = read_labels(save(folder / "turned.nii", np.ones((128, 8, 8), np.uint8), affine))
    assert fit(mask, generic_contract(1, 1, (4, 4, 64), spacing=(3.0, 3.0, 3.0))).apply(mask.array, label=True).all()


def test_labels_larger_than_the_grid_are_rejected_with_their_extent():
    with pytest.raises(InputError, match=r"axis X.*extends over 12 voxels .*\(12\.0 mm\).*has 8"):
        fit(volume(np.ones((12, 8, 8))), UNIT)
    assert fit(volume(np.ones((12, 8, 8))), UNIT, label=False).size == (8, 8, 8)
    assert fit(volume(np.ones((12, 8, 8))), UNIT, size=(8, 8, 12)).size == (8, 8, 12)


def test_empty_and_wide_volume_is_cropped_about_its_centre():
    placement = fit(volume(np.zeros((20, 8, 8))), UNIT)
    assert placement.origin == (6.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("array", "affine", "mode", "message"),
    [
        (np.ones((4, 4)), np.eye(4), "auto", "3D"),
        (np.ones((4, 4, 4)), np.full((4, 4), np.nan), "auto", "affine"),
        (np.ones((4, 4, 4)), np.diag([1.0, 1.0, 0.0, 1.0]), "auto", "singular"),
        (np.ones((4, 4, 4)), np.diag([1000.0, 1000.0, 1000.0, 1.0]), "auto", "millimetres"),
        (np.ones((4, 4, 4)), np.diag([0.001, 0.001, 0.001, 1.0]), "auto", "millimetres"),
        (np.ones((4, 4, 4)), np.eye(4), "stretch", "mode"),
    ],
)
def test_invalid_volumes_are_rejected(array, affine, mode, message):
    with pytest.raises(InputError, match=message):
        fit(volume(array, affine), UNIT, mode=mode)


def test_fill_outside_the_grid_of_the_model():
    labels = np.zeros((20, 8, 8), np.int32)
    labels[9:11] = 1
    placement = fit(volume(labels), UNIT)
    back = placement.invert(np.zeros((8, 8, 8), np.float32), label=False, fill=-1.0)
    assert (back[:6] == -1).all() and (back[6:14] == 0).all() and (back[14:] == -1).all()


def test_a_label_larger_than_the_grid_is_named_with_what_helps():
    contract = generic_contract(2, 1, (8, 8, 8))
    contract = replace(
        contract, labels=(Label(name="brain", value=1, channel=0), Label(name="tumour", value=2, channel=1))
    )
    labels = np.zeros((12, 8, 8), np.uint8)
    labels[:, 2:6, 2:6], labels[4:6, 3:5, 3:5] = 1, 2

    def message(consumer, *options):
        with (
            command_options(options),
            pytest.raises(InputError, match="axis X: brain extends over 12 voxels") as caught,
        ):
            fit(volume(labels), contract, consumer=consumer)
        return str(caught.value)

    assert message(MODEL, "--size").endswith("crop the mask and its images, or pass a larger --size")
    assert message(NEW_MODEL, "--size", "--set").endswith("such as --set data.spacing=[2,2,2]")
    assert "--" not in message(NEW_HEAD, "--size", "--set")
