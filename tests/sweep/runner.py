"""runner.py - runs the executable under limits of time and memory, and checks how it ends.

A run passes when it ends with a documented exit code, within the limits and without a sanitizer report. An error must
be exactly one line that names the option or file. A successful run must report finite losses."""
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

FILE_BYTES = 1 << 30  # limit of the size of a file that a run writes
ERROR = re.compile(rb"^moetrain(: error| [a-z ]*|): .*", re.M)
SANITIZER = re.compile(rb"^.*(AddressSanitizer|LeakSanitizer|ThreadSanitizer|runtime error:).*$", re.M)


def limits():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


class Result:
    def __init__(self, code, out, err, stopped, bytes_max, seconds):
        self.code, self.out, self.err = code, out, err
        self.stopped = stopped  # the signal that ended it: SIGTERM, SIGKILL or None
        self.bytes_max, self.seconds = bytes_max, seconds

    def errors(self):
        return [line for line in self.err.split(b"\n") if ERROR.match(line) or line.startswith(b"error: ")]


class Sweep:
    def __init__(self, args, name):
        self.args, self.name = args, name
        self.binary = os.path.abspath(args.binary)
        self.sanitized = b"__asan_init" in open(self.binary, "rb").read()
        self.root = tempfile.mkdtemp(prefix=f"sweep-{name}-", dir=args.scratch)
        self.memory = (4 << 30) if self.sanitized else (2 << 30)
        self.env = {
            "PATH": os.environ["PATH"], "HOME": self.root, "HF_HOME": self.path("hub"), "HF_HUB_OFFLINE": "1",
            "LC_ALL": "C", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OPENBLAS_NUM_THREADS": "1",
            "ASAN_OPTIONS": "exitcode=99:allocator_may_return_null=1:max_allocation_size_mb=16384:detect_leaks=%d:"
                            "handle_abort=0" % args.leaks,
            "UBSAN_OPTIONS": "halt_on_error=1:exitcode=99:print_stacktrace=1",
        }
        self.runs = self.seconds = self.peak = 0
        self.codes, self.failed = {}, []
        self.slowest = (0, "")

    def path(self, *parts):
        return os.path.join(self.root, *parts)

    def run(self, words, cwd, stdin=None, before=(), timeout=None):
        """before: words before the executable, such as moetrain_fault."""
        timeout = timeout or self.args.timeout
        outputs = [tempfile.TemporaryFile(dir=self.root) for _ in range(2)]
        started = time.monotonic()
        with open(stdin or os.devnull, "rb") as source:
            p = subprocess.Popen([*before, self.binary, *words], cwd=cwd, env=self.env, stdin=source,
                                 stdout=outputs[0], stderr=outputs[1], preexec_fn=limits, start_new_session=True)
        stopped, usage, status = None, None, None
        for deadline, sig in ((timeout, signal.SIGTERM), (timeout + 30, signal.SIGKILL), (timeout + 90, None)):
            pause = 0.002
            while time.monotonic() - started < deadline:
                pid, status, usage = os.wait4(p.pid, os.WNOHANG)
                if pid:
                    break
                time.sleep(pause)
                pause = min(pause * 1.3, 0.05)
            if pid or sig is None:
                break
            stopped = sig
            os.killpg(p.pid, sig)
        p.returncode = os.waitstatus_to_exitcode(status)
        try:
            os.killpg(p.pid, signal.SIGKILL)  # child processes that it left
        except ProcessLookupError:
            pass
        texts = []
        for f in outputs:
            f.seek(0)
            texts.append(f.read(1 << 20))
            f.close()
        return Result(p.returncode, texts[0], texts[1], stopped, usage.ru_maxrss * 1024, time.monotonic() - started)

    def judge(self, r, names=(), stop=False, codes=(0, 1, 2)):
        """What is wrong with the run, or None. names: an error must contain one of them. stop: the run may last until
        it is stopped."""
        report = SANITIZER.search(r.err)
        if report:
            return "sanitizer: " + report.group(0).decode(errors="replace")[:300]
        if r.stopped == signal.SIGKILL:
            return f"does not stop within 30 s of SIGTERM (code {r.code})"
        if r.stopped:
            return None if stop and r.code in (130, -signal.SIGTERM, *codes) else f"runs for over {r.seconds:.0f} s"
        if r.code not in codes:
            return f"exit code {r.code}"
        if r.bytes_max > self.memory:
            return f"takes {r.bytes_max / 2**30:.1f} GiB of memory"
        if re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]", r.err.replace(b"\x1b[K", b"")):
            return "control characters in messages"
        errors = r.errors()
        if r.code == 0:
            return "exit code 0 after an error" if errors else None
        if len(errors) != 1:
            return f"exit code {r.code} with {len(errors)} error lines"
        line = errors[0]
        if r.err.rstrip(b"\n").split(b"\n")[-1] != line:
            return "the error is not the last line"
        if names and not any(n.encode(errors="surrogateescape") in line for n in names if n):
            return "the error names neither " + " nor ".join(n[:60] for n in names if n)
        return None

    def add(self, name, r, wrong):
        self.runs += 1
        self.seconds += r.seconds
        self.codes[r.code] = self.codes.get(r.code, 0) + 1
        self.peak = max(self.peak, r.bytes_max)
        self.slowest = max(self.slowest, (r.seconds, name))
        if wrong:
            last = (r.errors() or r.err.rstrip(b"\n").split(b"\n"))[-1].decode(errors="replace")
            self.failed.append(name)
            print(f"FAIL {self.name} {name}: {wrong}\n     {last[:400]!a}", flush=True)

    def all(self, cases, do):
        """Calls do(case, folder) for each case of the slice, on several threads; deletes the folders afterwards."""
        first, every = self.args.first, self.args.every
        picked = [(i, c) for i, c in enumerate(cases) if i >= first and (i - first) % every == 0]
        if self.args.only:
            picked = [(i, c) for i, c in picked if self.args.only in str(c)]

        def one(item):
            i, case = item
            folder = self.path(f"case{i}")
            os.makedirs(folder)
            try:
                do(case, folder)
            except Exception as e:  # an exception in the sweep is a failure too
                self.failed.append(str(case))
                print(f"FAIL {self.name} {case!a:.200}: the sweep itself: {e!r}", flush=True)
            finally:
                if not self.args.keep:
                    shutil.rmtree(folder, ignore_errors=True)

        with ThreadPoolExecutor(self.args.jobs) as pool:
            for done, _ in enumerate(pool.map(one, picked), 1):
                if done % 500 == 0:
                    print(f"{self.name}: {done} of {len(picked)} cases", flush=True)
        print(f"{self.name}: {len(picked)} of {len(cases)} cases, {self.runs} runs, "
              f"{self.codes.get(0, 0)} of them succeeded, exit codes {dict(sorted(self.codes.items()))}, "
              f"peak {self.peak / 2**20:.0f} MiB, "
              f"slowest {self.slowest[0]:.1f} s ({self.slowest[1]!a:.100}), failed: {len(self.failed)}", flush=True)
        return len(self.failed)

    def close(self):
        if not self.args.keep:
            shutil.rmtree(self.root, ignore_errors=True)

    # ---- model and data of the sweeps

    def synth(self, arch, folder, *more):
        r = self.run(["synth", arch, folder, "--layers", "1", *more], self.root)
        if r.code:
            raise RuntimeError(r.err)
        return self.path(folder)

    def write_rows(self, name="rows.jsonl", n=8):
        with open(self.path(name), "w") as f:
            for i in range(n):
                f.write(json.dumps({"text": f"row {i}: " + "words to learn " * (1 + i % 3)}) + "\n")
        return self.path(name)

    def write_config(self, name, **sections):
        with open(self.path(name), "w") as f:
            for section, keys in sections.items():
                f.write(f"[{section}]\n" + "".join(f"{k} = {v}\n" for k, v in keys.items()))
        return self.path(name)


def finite_metrics(path):
    """Whether every loss in metrics.jsonl is a finite number."""
    with open(path, encoding="utf-8") as f:
        rows = [json.loads(line, parse_constant=lambda _: None) for line in f]
    losses = [row["loss"] for row in rows if row["event"] in ("step", "eval") and "skipped" not in row]
    return all(isinstance(v, (int, float)) for v in losses)
