"""What runs on clusters: Slurm scripts with a stand-in for Slurm, definitions of images, and the bundle without internet."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.factories.nifti import write_mask
from tests.scale.datasets import write_masks, write_model
from voxtune.scale.verify import verify

ROOT = Path(__file__).parent.parent
DEPLOY, SLURM = ROOT / "deploy", ROOT / "deploy" / "slurm"
SCRIPTS = [*sorted(SLURM.glob("*.sh")), DEPLOY / "install.sh"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Slurm and containers are those of Linux")


def executable(path: Path, text: str) -> None:
    path.write_text(textwrap.dedent(text).lstrip())
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path):
    """An environment of a job on this machine: srun runs the command here, and voxtune, ray and torchrun record it."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("voxtune", "torchrun"):
        executable(tools / name, f'#!/bin/bash\nprintf "%s\\n" {name} "$@" >"{tmp_path}/{name}.words"\n')
    executable(
        tools / "srun",
        """
        #!/bin/bash
        while [[ $1 == --* ]]; do shift; done
        exec "$@"
        """,
    )
    executable(tools / "scontrol", "#!/bin/bash\necho \"${SLURM_JOB_NODELIST//,/$'\\n'}\"\n")
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RAY", "VOXTUNE"))}
    return {**kept, **job, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def submit(script, *words, environment, folder, code=0):
    command = ["bash", str(SLURM / script), *map(str, words)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def words_of(folder, name):
    return (folder / f"{name}.words").read_text().splitlines()[1:]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_and_say_how_they_are_used(script, slurm, tmp_path):
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    done = subprocess.run(["bash", script], env=slurm, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage: " in done.stderr
    # Slurm stops to read its options at the first command.
    lines = script.read_text().splitlines()
    last = max((n for n, line in enumerate(lines) if line.startswith("#SBATCH")), default=0)
    assert all(not line or line.startswith("#") for line in lines[:last])


def test_the_linters_accept_them():
    """Those of `make lint`, where they are installed."""
    tools = Path(sys.executable).parent
    found = {name: shutil.which(name, path=f"{tools}:{os.environ['PATH']}") for name in ("shellcheck", "hadolint")}
    if not all(found.values()):
        pytest.skip("shellcheck and hadolint are not installed")
    assert subprocess.run([found["shellcheck"], *SCRIPTS], check=False).returncode == 0
    assert subprocess.run([found["hadolint"], DEPLOY / "Dockerfile"], check=False).returncode == 0


def test_an_array_task_draws_its_shard(slurm, tmp_path):
    task = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MAX": "16", "SLURM_ARRAY_TASK_COUNT": "16"}
    arguments = ("m.csv", "models/head", "out", "--per-mask", "10")
    submit("generate-array.sh", *arguments, environment=slurm | task, folder=tmp_path)
    expected = ["generate", "m.csv", "--model", "models/head", "-o", "out", "--shard", "3/16", "--quiet"]
    assert words_of(tmp_path, "voxtune") == [*expected, "--per-mask", "10"]
    some = {"SLURM_ARRAY_TASK_MAX": "7", "SLURM_ARRAY_TASK_COUNT": "2"}  # --array=3,7
    submit("generate-array.sh", *arguments, environment=slurm | task | some | {"SHARDS": "20"}, folder=tmp_path)
    assert "3/20" in words_of(tmp_path, "voxtune")
    for wrong in (some, {"SLURM_ARRAY_TASK_ID": ""}):
        submit("generate-array.sh", *arguments, environment=slurm | task | wrong, folder=tmp_path, code=2)


def test_training_starts_and_continues(slurm, tmp_path):
    job = slurm | {"SLURM_JOB_NODELIST": "a1,a2", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    submit("train.sh", "runs/x", "--images", "i", "--masks", "m", environment=job, folder=tmp_path)
    words = words_of(tmp_path, "torchrun")
    expected = ["--nnodes=2", "--nproc-per-node=4", "--rdzv-id=4711", "--rdzv-backend=c10d", "--rdzv-endpoint=a1:24711"]
    assert words[:5] == expected and "--max-restarts=3" in words
    assert words[-8:] == ["voxtune", "train", "-o", "runs/x", "--images", "i", "--masks", "m"]
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "train.json").write_text("{}")
    submit("train.sh", "runs/x", "--images", "i", environment=job, folder=tmp_path)
    assert words_of(tmp_path, "torchrun")[-4:] == ["voxtune", "train", "--resume", "runs/x"]


def real_tools(slurm, tmp_path):
    """The commands of this environment in place of those that record."""
    executable(tmp_path / "tools" / "voxtune", f'#!/bin/bash\nexec {sys.executable} -m voxtune "$@"\n')
    executable(tmp_path / "tools" / "ray", f'#!/bin/bash\nexec {sys.executable} -m ray.scripts.scripts "$@"\n')
    # A job has its own addresses; here everything stays on this machine.
    executable(tmp_path / "tools" / "hostname", "#!/bin/bash\necho 127.0.0.1\n")
    return slurm | {"SLURM_CPUS_PER_TASK": "2", "RAY_PORT": str(20000 + os.getpid() % 20000), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_ray_on_slurm_draws_a_data_set_and_leaves_nothing_behind(slurm, tmp_path):
    """The script with a real Ray cluster of one node; then with a signal, as Slurm sends before the end of a job."""
    pytest.importorskip("ray")
    job = real_tools(slurm, tmp_path)
    words = [write_masks(tmp_path / "masks", 3), write_model(tmp_path / "model"), tmp_path / "out", "--device", "cpu"]
    words += ["--per-mask", "2", "--plan", "baseline", "--batch", "1", "--workers", "2"]
    submit("generate-ray.sh", *words, environment=job, folder=tmp_path)
    assert verify(tmp_path / "out").problems == []
    assert not processes_with("RAY_AUTH_TOKEN", tmp_path)
    words[2:3] = [tmp_path / "signalled"]
    words[words.index("2")] = "300"
    script = subprocess.Popen(["bash", str(SLURM / "generate-ray.sh"), *map(str, words)], env=job, cwd=tmp_path)
    deadline = time.monotonic() + 240
    while not list((tmp_path / "signalled").rglob("*_T1w.json")):
        assert script.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    script.send_signal(signal.SIGTERM)
    assert script.wait(120) == 143
    result = verify(tmp_path / "signalled")
    assert 0 < result.verified < 900 and not result.damaged and not result.extra, "what was drawn is complete"
    assert not processes_with("RAY_AUTH_TOKEN", tmp_path)


def processes_with(variable, folder):
    """The processes that a script in this folder has left."""
    time.sleep(5)
    left = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            environment = (place / "environ").read_bytes().split(b"\0")
            own = any(e.startswith(variable.encode()) for e in environment)
            if own and f"PATH={folder}".encode() in b"\0".join(environment):
                left.append((place / "cmdline").read_bytes().replace(b"\0", b" ")[:100])
        except OSError:
            continue
    return left


def test_the_images_have_what_the_package_has():
    """Both install the same PyTorch, from the files of the repository that the wheel needs."""
    docker, apptainer = (DEPLOY / "Dockerfile").read_text(), (DEPLOY / "voxtune.def").read_text()
    torch = re.search(r"TORCH_VERSION=(\S+)", docker)
    assert torch and f"torch=={torch[1]} " in apptainer
    for base in re.findall(r"^(?:FROM|From:) (\S+)", docker + apptainer, re.MULTILINE):
        assert base == "python:3.12-slim-bookworm"
    for name in ("pyproject.toml", "README.md", "LICENSE", "src"):
        assert (ROOT / name).exists() and name in apptainer and name in docker
        assert f"!{name}" in (DEPLOY / "Dockerfile.dockerignore").read_text()
    for section in ("post", "environment", "runscript", "test"):
        body = re.search(rf"^%{section}\n(.*?)(?=^%|\Z)", apptainer, re.MULTILINE | re.DOTALL)
        assert body and subprocess.run(["sh", "-n"], input=body[1], text=True, check=False).returncode == 0


def isolated() -> list[str]:
    """The words before a command that take the network away from it, if this machine allows that."""
    words = ["unshare", "--net", "--map-root-user"]
    allowed = shutil.which("unshare") and subprocess.run([*words, "true"], check=False, capture_output=True)
    return words if allowed and allowed.returncode == 0 else []


# No proxy answers: where the network cannot be taken away, requests fail all the same.
REFUSED = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


@pytest.mark.slow
def test_a_bundle_installs_and_draws_without_a_network(tmp_path):
    model = write_model(tmp_path / "head")
    command = [sys.executable, "tools/bundle.py", "-o", tmp_path / "dist", "--no-archive", "--model", model]
    done = subprocess.run(
        [*map(str, command), "--extras", "report"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    bundle = tmp_path / "dist" / "voxtune-bundle"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}

    def offline(*words, code=0):
        command = [*isolated(), *map(str, words)]
        done = subprocess.run(command, env=kept | REFUSED, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    if isolated():
        probe = "import socket; socket.create_connection(('127.0.0.1', 22), 1)"
        assert "unreachable" in offline(sys.executable, "-c", probe, code=1)
    environment = tmp_path / "environment"
    base = Path(sys.base_prefix) / "bin" / "python3"
    assert "installed into" in offline("bash", bundle / "install.sh", environment, base)
    program, mask = environment / "bin" / "voxtune", write_mask(tmp_path / "sub-1_dseg.nii.gz")
    options = ["--mask", mask, "-o", tmp_path / "out", "--steps", "1", "--device", "cpu"]
    offline(program, "sample", environment / "models" / "head", *options)
    assert list((tmp_path / "out").rglob("*_T1w.nii.gz"))
    offline(program, "report", "--recorded", "-o", tmp_path / "report.html")
    where = offline(
        environment / "bin" / "python", "-c", "import torch, voxtune; print(torch.__file__, voxtune.__file__)"
    )
    assert where.count(str(environment)) == 2, "nothing of this machine's environment"
    # What is wrong is said before anything is installed.
    assert "already exists" in offline("bash", bundle / "install.sh", environment, base, code=2)
    (bundle / "models" / "head" / "config.json").write_text(json.dumps({}))
    assert "damaged or incomplete" in offline("bash", bundle / "install.sh", tmp_path / "second", base, code=2)
    (bundle / "PYTHON").write_text("2.7")
    assert "this bundle is for Python 2.7" in offline("bash", bundle / "install.sh", tmp_path / "second", base, code=2)
    assert not (tmp_path / "second").exists()
