"""The way into the sandbox: `python -I -S jail.py SETTINGS` (JSON) isolates its own process, then becomes the program it is to run.

Run as a file and by itself: standard library only, nothing of this package. What it sets up, in this order:

* namespaces of its own (unless `unsafe`): network, without even a loopback that is up; System V memory; mounts, in which the whole file system is
  read-only but for an empty directory in memory, where the program starts; users, which makes the others possible without being root, leaves the
  program without any capability, and keeps it from reading other processes' variables;
* it dies with the process that started it;
* limits of processor time, memory, file size, open files and processes;
* a filter of system calls (seccomp): no new processes, only threads; no sockets, tracing, mounts, namespaces or keys. It is why fork bombs, and
  programs that stay behind, are impossible also for root, whom the limit of processes does not bind.
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

EXIT_JAIL = 113  # the jail could not be built; the reason is on stderr

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, NR_MOUNT_SETATTR = -100, 0x8000, 0x1, 442
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
NOBODY = 65534

# linux/audit.h; numbers of asm/unistd_64.h and of asm-generic/unistd.h
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {
    "x86_64": {
        "clone": 56, "fork": 57, "vfork": 58, "clone3": 435, "socket": 41, "ptrace": 101, "mount": 165, "umount2": 166, "unshare": 272,
        "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321, "keyctl": 250, "add_key": 248, "request_key": 249,
        "mount_setattr": 442, "io_uring_setup": 425, "pidfd_getfd": 438, "kill": 62, "tkill": 200, "tgkill": 234, "pidfd_send_signal": 424,
    },
    "aarch64": {
        "clone": 220, "clone3": 435, "socket": 198, "ptrace": 117, "mount": 40, "umount2": 39, "unshare": 97, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280, "keyctl": 219, "add_key": 217, "request_key": 218, "mount_setattr": 442,
        "io_uring_setup": 425, "pidfd_getfd": 438, "kill": 129, "tkill": 130, "tgkill": 131, "pidfd_send_signal": 424,
    },
}  # fmt: skip
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
        os._exit(EXIT_JAIL)


def enter_namespaces(directory: str, mib: int) -> None:
    uid, gid = os.getuid(), os.getgid()
    call("unshare", CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWIPC)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    arguments = (AT_FDCWD, b"/", AT_RECURSIVE, attributes, len(attributes))
    call("syscall", *(_long(one) for one in (NR_MOUNT_SETATTR, *arguments)))
    options = f"size={mib}m,nr_inodes=4096,mode=700".encode()
    call("mount", b"tmpfs", directory.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options)


def _long(value: "int | bytes") -> object:
    """`syscall` takes words, and ctypes hands over ints of half that length."""
    return ctypes.c_long(value) if isinstance(value, int) else value


def set_limits(settings: "dict[str, int]") -> None:
    for name in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_STACK"):
        most = settings[name]
        hard = resource.getrlimit(getattr(resource, name))[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(getattr(resource, name), (most, most))
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
    for number in calls.values():
        code += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def filter_calls() -> None:
    machine = platform.machine()
    if machine not in CALLS:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {machine}")
    instructions = program(machine)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    header = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(buffer))
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)


def main() -> None:
    settings = json.loads(sys.argv[1])
    try:
        with open(settings["program"], encoding="utf-8") as file:
            source = file.read()
        if not settings["unsafe"]:
            enter_namespaces(settings["directory"], settings["directory_mib"])
        die_with_parent(settings["parent"])  # not before: entering a namespace of users takes it back
        os.chdir(settings["directory"])
        with open("program.py", "w", encoding="utf-8") as file:
            file.write(source)
        set_limits(settings["limits"])
        filter_calls()
    except OSError as error:
        print(f"{error.strerror or error}", file=sys.stderr)
        sys.exit(EXIT_JAIL)
    os.execve(sys.executable, [sys.executable, "-I", "program.py"], settings["environment"])


if __name__ == "__main__":
    main()
