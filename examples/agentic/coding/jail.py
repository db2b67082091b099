"""Builds a jail out of Linux namespaces, then becomes the program: `python -I -S jail.py JSON`. Started by `sandbox.py`, never imported.

    new mount, network, pid, ipc and host-name namespaces, and a user namespace unless we are root -> an empty root of tmpfs with
    Python's files read-only, /task and three devices -> fork: the parent waits and passes on the status, the child is process 1 of
    its own and becomes nobody -> fork: process 1 buries the dead, process 2 limits itself and executes the program

Whoever ends, the processes below end with it: process 1 dies with its parent, and the kernel ends a namespace with its process 1. The
program can neither signal nor trace that one; of itself it could undo whatever it was to die of. Root needs no user namespace, and
becomes a user of this run's own in the end, because the limit of processes counts by user and does not bind root. Inside, the program
has no capabilities and no way to get any. Only the standard library is used, and all of it is imported before the root changes.
"""

import ctypes
import errno
import json
import os
import resource
import select
import signal
import stat
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
INSIDE_ID = 1000
FIRST_OWN_ID = 1 << 20
EXIT_NO_JAIL = 125
DEVICES = ("null", "zero", "urandom")

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """Call the C library. Raises: OSError."""
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount. Raises: OSError."""
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    call("mount", *encoded, ctypes.c_ulong(flags), None if data is None else data.encode())


def bind_read_only(source: str, target: str) -> None:
    """Show a folder or file at another place, not to be written."""
    mount(source, target, None, MS_BIND | MS_REC)
    # Flags that the outer mount has are locked here and must be named again.
    locked = {os.ST_NOSUID: MS_NOSUID, os.ST_NODEV: MS_NODEV, os.ST_NOEXEC: MS_NOEXEC}
    kept = sum(flag for bit, flag in locked.items() if os.statvfs(target).f_flag & bit)
    mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept)


def build_root(root: str, shown: list[str], work_bytes: int) -> None:
    """Make the new root: what is shown, an empty /task, three devices."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={work_bytes},mode=755,nr_inodes=4096")
    for path in shown:
        target = root + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
        elif os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
            bind_read_only(path, target)
        elif os.path.exists(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "w").close()
            bind_read_only(path, target)
    for name in ("task", "tmp", "dev", "old"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    for name in ("task", "tmp"):
        os.chmod(f"{root}/{name}", 0o1777)
    for name in DEVICES:
        open(f"{root}/dev/{name}", "w").close()
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, MS_BIND)


def enter(root: str) -> None:
    """Make `root` the root and forget the former one."""
    number = SYS_PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"no number for pivot_root on {os.uname().machine}")
    if libc.syscall(number, root.encode(), f"{root}/old".encode()) != 0:
        raise OSError(ctypes.get_errno(), f"pivot_root: {os.strerror(ctypes.get_errno())}")
    os.chdir("/")
    call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    os.chdir("/task")


def become(number: int) -> None:
    """Give root away for good."""
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)


def leave_namespaces(*, with_user: bool) -> None:
    """Leave the namespaces that we share with others."""
    flags = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", flags | CLONE_NEWUSER if with_user else flags)
    if with_user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{INSIDE_ID} {uid} 1"), ("gid_map", f"{INSIDE_ID} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def limit(limits: dict[str, int]) -> None:
    """Set the limits of what follows."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def die_with_parent() -> None:
    """Be killed when the parent ends; a change of user undoes it."""
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def run_program(plan: dict[str, object], limits: dict[str, int]) -> None:
    """Become the program."""
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.closerange(3, 65536)
    os.umask(stat.S_IWGRP | stat.S_IWOTH)
    limit(limits)
    python = str(plan["python"])
    # The program is no root inside, so that its capabilities end here.
    os.execve(python, [python, "-I", "-S", "-B", "/task/main.py"], {"HOME": "/task", "PATH": "/usr/bin:/bin"})


def be_first(plan: dict[str, object], limits: dict[str, int], own_id: int, parent_lives: int) -> int:
    """Be process 1: start the program, wait for it and for the orphans of others; returns its status."""
    if not plan["user_namespace"]:
        become(own_id)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a process 1 gets the signals of its own namespace only where it handles them
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    die_with_parent()
    if select.select([parent_lives], [], [], 0)[0]:
        return EXIT_NO_JAIL  # the parent ended before that
    program = os.fork()
    if program == 0:
        run_program(plan, limits)
    ended = status = 0
    while ended != program:
        ended, status = os.wait()
    return exit_status(status)


def exit_status(status: int) -> int:
    """Return what `wait` said as a number to exit with."""
    return os.waitstatus_to_exitcode(status) & 0xFF


def main() -> int:
    """Build the jail and run the program in it; returns its status."""
    die_with_parent()
    plan = json.loads(sys.argv[1])
    own_id = FIRST_OWN_ID + os.getpid()
    code = sys.stdin.buffer.read()
    try:
        leave_namespaces(with_user=plan["user_namespace"])
        build_root(plan["root"], plan["shown"], plan["work_bytes"])
        enter(plan["root"])
    except OSError as error:
        print(f"no jail: {error}", file=sys.stderr)
        return EXIT_NO_JAIL
    with open("/task/main.py", "wb") as file:
        file.write(code)
    parent_lives, held_by_parent = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(held_by_parent)
        os._exit(be_first(plan, plan["limits"], own_id, parent_lives))
    return exit_status(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
