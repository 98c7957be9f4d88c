"""How much memory the host has, as the system's files tell it."""

import pytest

from dsv4cli.engine.system import host_memory as module
from dsv4cli.engine.system.host_memory import host_memory

GIB = 2**30
MEMINFO = "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\nHugePages_Total: 0\n"
# files of a control group: limit, use, the line of both kinds of pages of files
V2 = ("memory.max", "memory.current", "inactive_file {0}\nactive_file {0}\n")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file {0}\ntotal_active_file {0}\n")


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A function that writes a file of a system with 8 GiB, of which 6 are free."""

    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    for name, file in {"MEMINFO": "meminfo", "GROUPS": "groups", "CGROUP": "cgroup"}.items():
        monkeypatch.setattr(module, name, tmp_path / file)
    monkeypatch.setattr(module, "VM_STAT", str(tmp_path / "none"))
    write("meminfo", MEMINFO)
    return write


def group(write, folder, version, limit, used, pages=0):
    """Writes a control group: bytes, or what stands for no limit; GiB that are used, and among them pages of files."""
    texts = (f"{limit}\n", f"{used * GIB}\n", "anon 1\n" + version[2].format(pages * GIB // 2))
    for name, text in zip((*version[:2], "memory.stat"), texts, strict=True):
        write(f"cgroup/{folder}/{name}", text)


def test_a_machine_without_control_groups(system):
    assert host_memory() == (8 * GIB, 6 * GIB)
    system("meminfo", "MemTotal: 8388608 kB\n")
    assert host_memory() is None


def test_a_system_that_does_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr(module, "VM_STAT", str(tmp_path / "none"))
    assert host_memory() is None


# the lines of /proc/self/cgroup, the folder of the group that has the limit
LIMITED = {
    "a container": ("0::/\n", ".", V2),
    "a container, v1": ("5:cpu,cpuacct:/docker/77\n4:memory:/docker/77\n0::/\n", "memory", V1),
    "a job": ("0::/slurm/job_7/step_0\n", "slurm/job_7", V2),
    "a job, v1": ("4:hugetlb,memory:/slurm/job_7\n", "memory/slurm/job_7", V1),
}


@pytest.mark.parametrize("case", LIMITED)
def test_a_limit(system, case):
    groups, folder, version = LIMITED[case]
    system("groups", groups)
    group(system, "other", V2, GIB, 1)
    group(system, folder, version, 4 * GIB, 3, pages=2)
    assert host_memory() == (4 * GIB, 3 * GIB)
    group(system, folder, version, 4 * GIB, 5)
    assert host_memory() == (4 * GIB, 0)
    group(system, folder, version, {V1: 2**63 - 4096, V2: "max"}[version], 3)
    assert host_memory() == (8 * GIB, 6 * GIB)


# of macOS 15, on a machine of 16 GiB
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               65536.
Pages active:                            300000.
Pages inactive:                          131072.
Pages speculative:                        65536.
Pages wired down:                        100000.
"Translation faults":                 123456789.
File-backed pages:                       200000.
"""


@pytest.mark.parametrize(("reported", "free"), [(VM_STAT, 4 * GIB), ("", None), ("Pages free: 3.\n", None)])
def test_a_mac(tmp_path, monkeypatch, reported, free):
    program = tmp_path / "vm_stat"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{reported}END\n")
    program.chmod(0o755)
    monkeypatch.setattr(module, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr(module, "VM_STAT", str(program))
    found = host_memory()
    assert (found and found.free) == free
    if found is not None:
        assert found.total > found.free > 0
