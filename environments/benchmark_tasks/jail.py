"""The way into the sandbox: `python -I -S jail.py SETTINGS` (JSON) isolates its own process, then becomes the program.

Run as a file and by itself: standard library only, nothing of this package. What it sets up, in this order:

* namespaces of its own (unless `unsafe`): network, with no loopback up; System V memory; mounts of nothing but what
  Python needs, read-only, and a directory in memory, where the program starts: no data, keys, or other processes;
  users, which makes the others possible without root, and leaves the program without any capability;
* it dies with the process that started it;
* limits of processor time, memory, file size, open files and processes;
* a filter of system calls (seccomp): no new processes, only threads; no sockets, tracing, mounts, namespaces or keys.
  It makes fork bombs, and programs that stay behind, impossible for root, too, which the limit of processes does not
  bind. Nor can it reach other processes of its user by guessing their numbers: no signals (also none for what happens
  to a file), no limits, priorities, processors or pages of theirs.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x2, 0x4, 0x1000, 0x4000, 0x40000, 0x2
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, NR_MOUNT_SETATTR = -100, 0x8000, 0x1, 442
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
NR_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
NOBODY = 65534
WORK = "/sandbox-of-one-run"  # no machine has its Python below it
# What Python and its extensions load, beside its own directories.
VISIBLE = ("/usr", "/bin", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

# linux/audit.h; numbers of asm/unistd_64.h and of asm-generic/unistd.h
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {
    "x86_64": {
        "clone": 56, "fork": 57, "vfork": 58, "clone3": 435, "socket": 41, "ptrace": 101, "mount": 165, "umount2": 166,
        "unshare": 272, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321, "keyctl": 250,
        "add_key": 248, "request_key": 249, "mount_setattr": 442, "io_uring_setup": 425, "pidfd_getfd": 438,
        "kill": 62, "tkill": 200, "tgkill": 234, "pidfd_send_signal": 424, "rt_sigqueueinfo": 129,
        "rt_tgsigqueueinfo": 297, "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144,
        "sched_setaffinity": 203, "sched_setattr": 314, "ioprio_set": 251, "migrate_pages": 256, "move_pages": 279,
        "kcmp": 312, "process_madvise": 440, "process_mrelease": 448, "perf_event_open": 298, "prlimit64": 302,
        "prctl": 157, "fcntl": 72, "ioctl": 16,
    },
    "aarch64": {
        "clone": 220, "clone3": 435, "socket": 198, "ptrace": 117, "mount": 40, "umount2": 39, "unshare": 97,
        "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280, "keyctl": 219, "add_key": 217,
        "request_key": 218, "mount_setattr": 442, "io_uring_setup": 425, "pidfd_getfd": 438, "kill": 129, "tkill": 130,
        "tgkill": 131, "pidfd_send_signal": 424, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "setpriority": 140,
        "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "sched_setattr": 274,
        "ioprio_set": 30, "migrate_pages": 238, "move_pages": 239, "kcmp": 272, "process_madvise": 440,
        "process_mrelease": 448, "perf_event_open": 241, "prlimit64": 261, "prctl": 167, "fcntl": 25, "ioctl": 29,
    },
}  # fmt: skip
# Of these the argument with that number decides: `True` refuses what is listed, `False` all else.
BY_ARGUMENT: "dict[str, tuple[int, bool, tuple[int, ...]]]" = {
    "prlimit64": (0, False, (0,)),  # its own limits, which libc asks for
    "prctl": (0, True, (PR_SET_PDEATHSIG,)),  # it would outlive who started it
    "fcntl": (1, True, (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX: any signal to anyone
    "ioctl": (1, True, (0x8901, 0x8902)),  # FIOSETOWN, SIOCSPGRP: the same
}
CLONE_THREAD = 0x00010000
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # with an errno in the low bits
LOAD, JUMP_EQUAL, JUMP_GREATER, JUMP_SET, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """A function of libc; OSError that names it where it fails."""
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def die_with_parent(parent: int) -> None:
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it is dead already
        os._exit(1)


def enter_namespaces(directory: str, mib: int, python: "list[str]") -> None:
    """Enter own namespaces, in which `directory` is the root, of `mib` MiB of memory, with the paths `python` in it."""
    uid, gid = os.getuid(), os.getgid()
    call("unshare", CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWIPC)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    options = f"size={mib}m,nr_inodes=4096,mode=755".encode()
    call("mount", b"tmpfs", directory.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)
    for path in (*VISIBLE, *DEVICES, *python):
        show(path, directory)
    os.mkdir(directory + WORK)
    os.chdir(directory)
    # The old root comes to lie over the new one, and is taken off: man 2 pivot_root.
    system_call(NR_PIVOT_ROOT[platform.machine()], b".", b".")
    call("umount2", b".", MNT_DETACH)


def show(path: str, root: str) -> None:
    """Show a file or directory, read-only, or a symbolic link at the same place below `root`; do nothing where there is
    none, or it is there already."""
    target = root + path
    if not os.path.exists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return show(os.path.realpath(path), root)
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
    call("mount", path.encode(), target.encode(), None, MS_BIND | MS_REC, None)
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    if path not in DEVICES:
        system_call(NR_MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, len(attributes))


def system_call(number: int, *arguments: "int | bytes") -> None:
    """One that libc has no function for. It takes words, and ctypes hands over ints of half that length."""
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in (number, *arguments)]
    call("syscall", *words)


def set_limits(settings: "dict[str, int]") -> None:
    for name in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_STACK"):
        most = settings[name]
        hard = resource.getrlimit(getattr(resource, name))[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard - (name == "RLIMIT_CPU"))
        # At the first limit of processor time comes a signal, which the program may ignore; the second one kills it.
        resource.setrlimit(getattr(resource, name), (most, most + 1 if name == "RLIMIT_CPU" else most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def program(machine: str) -> bytes:
    """The filter, as instructions of BPF: refuse what `CALLS` names, and what is not of this architecture."""
    calls = dict(CALLS[machine])
    clone, clone3 = calls.pop("clone"), calls.pop("clone3")
    code: list[tuple[int, int, int, int]] = [
        (LOAD, 0, 0, 4),  # the architecture
        (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
        (LOAD, 0, 0, 0),  # the call
        (JUMP_GREATER, 0, 1, 0x3FFFFFFF),  # calls of x32
        (RETURN, 0, 0, REFUSE | errno.EPERM),
        (JUMP_EQUAL, 0, 1, clone3),  # its flags are in memory, out of sight; libc falls back to clone
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
        (JUMP_EQUAL, 0, 4, clone),
        (LOAD, 0, 0, 16),  # its flags
        (JUMP_SET, 0, 1, CLONE_THREAD),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
    ]
    for name, (place, refused, values) in BY_ARGUMENT.items():
        hit, other = (REFUSE | errno.EPERM, ALLOW) if refused else (ALLOW, REFUSE | errno.EPERM)
        # The lower half alone, which is all that the kernel looks at of these; both architectures have it first.
        decide = [(LOAD, 0, 0, 16 + 8 * place)]
        for value in values:
            decide += [(JUMP_EQUAL, 0, 1, value), (RETURN, 0, 0, hit)]
        code += [(JUMP_EQUAL, 0, len(decide) + 1, calls.pop(name)), *decide, (RETURN, 0, 0, other)]
    for number in calls.values():
        code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def filter_calls() -> None:
    instructions = program(platform.machine())
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    header = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(buffer))
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)


def main() -> None:
    settings = json.loads(sys.argv[1])
    os.set_inheritable(
        settings["reason"], False
    )  # closed when the program begins: it cannot claim that there is no jail
    try:
        if platform.machine() not in CALLS:
            raise OSError(errno.ENOSYS, f"no filter of system calls for {platform.machine()}")
        with open(settings["program"], encoding="utf-8") as file:
            source = file.read()
        if not settings["unsafe"]:
            enter_namespaces(settings["directory"], settings["directory_mib"], settings["python"])
        die_with_parent(settings["parent"])  # not before: entering a namespace of users takes it back
        os.chdir(settings["directory"] if settings["unsafe"] else WORK)
        with open("program.py", "w", encoding="utf-8") as file:
            file.write(source)
        set_limits(settings["limits"])
        filter_calls()
    except OSError as error:
        os.write(settings["reason"], str(error.strerror or error).encode())
        sys.exit(1)
    os.execve(sys.executable, [sys.executable, "-I", "program.py"], settings["environment"])


if __name__ == "__main__":
    main()
