"""The files of docs/deploy: a container image, a systemd unit and its options."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from fnmatch import fnmatch
from pathlib import Path

import pytest

from dsv4cli import cli
from tests.support.program import ROOT, command
from tests.support.serving import served

DEPLOY = ROOT / "docs" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", "")
UNIT = (DEPLOY / "dsv4.service").read_text("utf-8")
SERVE = command(cli.app).commands["serve"]


def steps(name):
    """What the instructions of this name say."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def variables():
    """Every DSV4_SERVE_* that the files set."""
    texts = [DOCKERFILE, UNIT, (DEPLOY / "serve.env").read_text("utf-8")]
    return {name for text in texts for name in re.findall(r"DSV4_SERVE_\w+", text)}


def test_variables_set_options():
    assert {"DSV4_SERVE_HOST", "DSV4_SERVE_TP"} < variables()
    assert variables() <= {param.envvar for param in SERVE.params}


def test_values_of_variables_are_valid():
    lines = [line for line in (DEPLOY / "serve.env").read_text("utf-8").splitlines() if line and line[0] != "#"]
    options = {param.envvar: param for param in SERVE.params}
    with SERVE.make_context("serve", [], resilient_parsing=True) as context:
        for line in [*lines, *steps("ENV")[0].split()[1:]]:
            name, _, value = line.partition("=")
            options[name].type_cast_value(
                context, [value] if options[name].nargs != 1 or options[name].multiple else value
            )


def test_the_image_installs_what_the_project_has():
    assert steps("COPY") == [". /src"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    [(extras)] = re.findall(r"pip install .*'/src\[(.*)\]'", DOCKERFILE)
    assert {*extras.split(",")} <= project["optional-dependencies"].keys()
    [version] = re.findall(r"^FROM python:3\.(\d+)-slim$", DOCKERFILE, re.MULTILINE)
    assert f"Programming Language :: Python :: 3.{version}" in project["classifiers"] or int(version) >= 11
    assert f"{steps('ENTRYPOINT')}{steps('CMD')}" == """['["dsv4"]']['["serve"]']"""


def test_the_image_says_whether_it_is_healthy():
    [words] = re.findall(r'HEALTHCHECK .*CMD \["python", "-c", "(.*)"\]', DOCKERFILE)
    with served("random:tiny,layers=3") as server:
        own = words.replace(":8000", f":{server.port}")
        assert own != words
        exec(own, {"urllib": urllib})
        server.asked.hung_seconds = -1.0
        with pytest.raises(OSError, match="503"):
            exec(own, {"urllib": urllib})


@pytest.mark.slow
def test_the_image_builds_from_what_it_copies(tmp_path):
    """Its last step but for dependencies, which take gigabytes, and the container itself."""
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").split()

    def left_out(folder, names):
        inner = Path(folder) != ROOT
        return {name for name in names if any(fnmatch(name, one.removeprefix("**/")) for one in ignored
                                              if one.startswith("**/") or not inner)}  # fmt: skip

    shutil.copytree(ROOT, tmp_path / "src", ignore=left_out, symlinks=True)
    [step] = [one for one in steps("RUN") if one.startswith("pip install")]
    words = shlex.split(step.partition(" && ")[0].replace("/src", f"{tmp_path}/src"))
    own = ["--no-deps", "--no-build-isolation", "--target", str(tmp_path / "site")]
    subprocess.run([sys.executable, "-m", *words, *own], check=True, capture_output=True, cwd=tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "dsv4cli", "serve", "--help"], env={"PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("Usage: dsv4 serve"), done.stderr
    assert (tmp_path / "site" / "dsv4cli" / "engine" / "server" / "page.html").exists()
    assert (tmp_path / "site" / "bin" / "dsv4").exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_has_nothing_against_the_unit(tmp_path):
    unit = tmp_path / "dsv4.service"
    assert UNIT.count("/opt/dsv4/bin/dsv4") == 1
    unit.write_text(UNIT.replace("/opt/dsv4/bin/dsv4", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    unit.write_text(unit.read_text().replace("Type=exec", "Type=exce"))  # it complains of what is wrong
    assert "exce" in subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True).stderr


def test_the_unit_waits_for_answers_and_takes_the_end_for_success():
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT, re.MULTILINE))
    grace = next(param.default for param in SERVE.params if param.name == "grace")
    assert float(settings["TimeoutStopSec"]) > grace
    assert settings["SuccessExitStatus"] == "143"
    assert settings["EnvironmentFile"] in (DEPLOY / "serve.env").read_text("utf-8").splitlines()[0]
    assert settings["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert "DSV4_SERVE_API_KEY_FILE" in variables()  # which SIGHUP rereads
