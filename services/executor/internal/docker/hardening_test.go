package docker

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// A process inside a sandbox sees the expected restrictions.
func TestHardening(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	cfg.TmpBytes = 32 << 20
	b := create(t, provide(t, cfg), newSpec(t))
	id := strconv.Itoa(userIn(t, b))
	for name, tc := range map[string]struct{ line, want string }{
		"interfaces":       {`ls /sys/class/net`, "lo"},
		"routes":           {`tail -n +2 /proc/net/route | wc -l`, "0"},
		"capabilities":     {`grep -E '^Cap(Inh|Prm|Eff|Bnd|Amb)' /proc/self/status | grep -vc 0000000000000000`, "0"},
		"no new rights":    {`grep NoNewPrivs /proc/self/status`, "NoNewPrivs:\t1"},
		"seccomp":          {`grep '^Seccomp:' /proc/self/status`, "Seccomp:\t2"},
		"root":             {`touch /x /etc/x /usr/x /var/tmp/x /spool/x /spool/bin/x 2>&1 | grep -vc 'Read-only file system'`, "0"},
		"socket":           {`ls /var/run/docker.sock /run/docker.sock 2>/dev/null | wc -l`, "0"},
		"devices":          {`find /dev -type b | wc -l; test -e /dev/kmsg || echo none`, "0\nnone"},
		"first process":    {`tr '\0' ' ' </proc/1/cmdline`, "/spool/bin/runner serve"},
		"workspace":        {`stat -c '%u %g %a' /workspace /mnt/workspace`, id + " " + id + " 700\n" + id + " " + id + " 700"},
		"twice":            {`touch /workspace/a && ls /mnt/workspace`, "a"},
		"home":             {`stat -c '%u %a' "$HOME"; echo $(df -B1 --output=size "$HOME" | tail -1)`, id + " 700\n" + strconv.Itoa(32<<20)},
		"tmp is in memory": {`stat -f -c %T /tmp "$HOME"`, "tmpfs\ntmpfs"},
		"core files":       {`ulimit -c`, "0"},
		"name":             {`cat /proc/sys/kernel/hostname`, "sandbox"},
		"mounting":         {`mount -t tmpfs none /mnt 2>/dev/null || echo refused`, "refused"},
		"namespaces":       {`unshare -U true 2>/dev/null || echo refused`, "refused"},
		"set-user-ID":      {`su -c true 2>/dev/null </dev/null || echo refused`, "refused"},
		"kernel settings":  {`echo 1 2>/dev/null >/proc/sys/kernel/panic || echo refused`, "refused"},
	} {
		if out, errs, _ := sh(t, b, tc.line); out != tc.want {
			t.Errorf("%s: %q, want %q (%s)", name, out, tc.want, errs)
		}
	}
}

// A sandbox has exactly the expected mounts, and only the expected ones are writable.
func TestMounts(t *testing.T) {
	t.Parallel()
	b := create(t, provide(t, needEngine(t)), newSpec(t))
	out, _, _ := sh(t, b, `while read -r from target kind opts rest; do
		test -w "$target" && w=w || w=-
		test -c "$target" && w=- # masked by the empty device
		echo "$w $target $kind $opts"
	done </proc/mounts`)
	ours := map[string]bool{workspaceDir: true, workspaceAlias: true, stateDir: true, "/tmp": true, homeDir: true, runDir: true, binDir: false,
		"/usr" + skillsDir: false, // the image's /bin is a link
		userDir:            false, "/etc/passwd": false, "/etc/group": false,
	}
	engines := map[string]bool{
		"/": false, "/proc": false, "/sys": false, "/dev": false, "/dev/pts": false, "/dev/shm": true, "/dev/mqueue": true,
		"/etc/hosts": false, "/etc/hostname": false, "/etc/resolv.conf": false,
	}
	seen := map[string]bool{}
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		writable, target, kind, opts := f[0] == "w", f[1], f[2], strings.Split(f[3], ",")
		seen[target] = true
		want, known := ours[target]
		if !known {
			want, known = engines[target]
		}
		known = known || strings.HasPrefix(target, "/proc/") || strings.HasPrefix(target, "/sys/")
		if !known || writable != want {
			t.Errorf("unexpected: %s", line)
		}
		if slices.Contains([]string{"/tmp", homeDir, runDir}, target) && !(slices.Contains(opts, "nosuid") && slices.Contains(opts, "nodev") && kind == "tmpfs") {
			t.Errorf("%s is not in memory, or lacks nosuid or nodev: %s", target, line)
		}
		if (target == binDir || target == "/usr"+skillsDir) && opts[0] != "ro" {
			t.Errorf("the runner's folder, or that of skills, is not read-only: %s", line)
		}
	}
	for target := range ours {
		if !seen[target] {
			t.Errorf("%s is not mounted", target)
		}
	}
}

// An environment has only the listed variables: none of the host, and no key.
func TestEnvironment(t *testing.T) {
	cfg := needEngine(t)
	t.Setenv("ANTHROPIC_API_KEY", "sk-must-not-be-seen")
	cfg.EgressSockets = t.TempDir()
	spec := newSpec(t)
	spec.EgressToken = "egress-token"
	b := create(t, provide(t, cfg), spec)
	known := []string{"PATH", "HOME", "LANG", "HOSTNAME", "PWD", "SHLVL", "_",
		"SPOOL_RUNNER_SOCKET", "SPOOL_RUNNER_WORKSPACE", "SPOOL_RUNNER_STATE", "SPOOL_RUNNER_DISK_LIMIT", "SPOOL_RUNNER_EGRESS_SOCKET", "SPOOL_RUNNER_EGRESS_TOKEN"}
	for _, line := range []string{`env`, `tr '\0' '\n' </proc/1/environ 2>/dev/null`} {
		out, _, _ := sh(t, b, line)
		if line == "env" && strings.Contains(out, "SPOOL_RUNNER_") {
			t.Errorf("a command has the runner's own variables:\n%s", out)
		}
		for v := range strings.Lines(out) {
			if key, _, _ := strings.Cut(v, "="); !slices.Contains(known, key) || strings.Contains(v, "must-not-be-seen") {
				t.Errorf("%s shows %s", line, v)
			}
		}
	}
	got, err := b.p.api.ContainerInspect(t.Context(), b.container)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"SPOOL_RUNNER_EGRESS_SOCKET=/run/spool/egress/egress.sock", "SPOOL_RUNNER_EGRESS_TOKEN=egress-token"}
	for _, v := range want {
		if !slices.Contains(got.Config.Env, v) {
			t.Errorf("the runner lacks %s: %v", v, got.Config.Env)
		}
	}
	for _, v := range got.Config.Env {
		if strings.Contains(v, "must-not-be-seen") {
			t.Errorf("the container has %s", v)
		}
	}
	if out, _, code := sh(t, b, `touch /run/spool/egress/x`); code == 0 {
		t.Errorf("the folder of the sockets can be written: %s", out)
	}
}

// The egress socket is in a folder, or a volume, that cannot be written.
func TestEgressSockets(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	spec := newSpec(t)
	spec.EgressToken = "t"
	if _, err := provide(t, cfg).Create(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "EgressSockets") {
		t.Errorf("a way out that the provider does not have: %v", err)
	}
	cfg.EgressSockets = "relative/path"
	if _, err := New(withRequired(cfg)); err == nil || !strings.Contains(err.Error(), "EgressSockets") {
		t.Errorf("a relative path: %v", err)
	}
	cfg.EgressSockets = "spool-test-" + strings.ToLower(engine)
	p := provide(t, cfg)
	b := create(t, p, spec)
	t.Cleanup(func() { // before the sandbox goes, so a second time after it
		if err := p.Terminate(context.Background(), spec.ID, true); err != nil {
			t.Error(err)
		}
		if gone, err := p.removeVolume(context.Background(), cfg.EgressSockets); !gone || err != nil {
			t.Errorf("the sockets' volume stays: %v", err)
		}
	})
	if out, _, code := sh(t, b, `grep ' /run/spool/egress ' /proc/mounts | cut -d' ' -f4 | cut -d, -f1`); out != "ro" || code != 0 {
		t.Errorf("the volume of the sockets is mounted %q", out)
	}
}

// A process that exceeds the memory limit is killed; the sandbox continues.
func TestMemoryLimit(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	spec := newSpec(t)
	spec.Limits.MemoryBytes = 128 << 20
	b := create(t, p, spec)
	// A variable of 512 MB, in the shell itself.
	_, errs, code := sh(t, b, `a=0123456789abcdef; i=0; while [ $i -lt 25 ]; do a=$a$a; i=$((i+1)); done; echo survived`)
	if code != -1 {
		t.Errorf("what eats memory ended with %d: %s", code, errs)
	}
	if out, _, code := sh(t, b, `echo well`); out != "well" || code != 0 {
		t.Errorf("after it: %q, code %d", out, code)
	}
	if s, err := p.State(t.Context(), spec.ID); err != nil || !s.Running {
		t.Errorf("state %+v, %v", s, err)
	}
	// Files in memory count as well, and have a lower limit of their own.
	if out, _, _ := sh(t, b, `cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory/memory.memsw.limit_in_bytes 2>/dev/null ||
		cat /sys/fs/cgroup/memory.max`); !strings.HasPrefix(out, strconv.Itoa(128<<20)) {
		t.Errorf("the limit is %q", out)
	}
}

// A sandbox whose runner was killed for lack of memory is reported, and can be started again.
func TestRunnerOutOfMemory(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	spec := newSpec(t)
	spec.Limits.MemoryBytes = 128 << 20
	b := create(t, p, spec)
	if s, err := p.State(t.Context(), spec.ID); err != nil || s != (State{Running: true}) {
		t.Errorf("at first: %+v, %v", s, err)
	}
	if out, _, _ := sh(t, b, `{ echo 1000 >/proc/1/oom_score_adj; } 2>/dev/null || echo refused`); out != "refused" {
		t.Errorf("a program inside makes the runner the kernel's first choice: %s", out)
	}
	got, err := p.api.ContainerInspect(t.Context(), b.container)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", got.State.Pid), []byte("1000"), 0); err != nil { // from outside
		t.Fatal(err)
	}
	gone, errs := p.api.ContainerWait(t.Context(), b.container, container.WaitConditionNotRunning)
	if _, _, code := sh(t, b, `a=0123456789abcdef; while :; do a=$a$a; done`); code != -1 {
		t.Errorf("what ate the memory ended with %d", code)
	}
	select {
	case <-gone:
	case err := <-errs:
		t.Fatal(err)
	}
	if s, err := p.State(t.Context(), spec.ID); err != nil || s != (State{OOMKilled: true, ExitCode: 137}) {
		t.Errorf("after its end: %+v, %v", s, err)
	}
	if alive, err := b.Running(t.Context()); alive || err != nil {
		t.Errorf("runs: %v, %v", alive, err)
	}
	if out, _, _ := sh(t, create(t, p, spec), `echo well`); out != "well" {
		t.Errorf("started again: %q", out)
	}
}

// A fork bomb stays inside its sandbox, and ends with it.
func TestPIDLimit(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	spec := newSpec(t)
	spec.Limits.PIDs = 64
	b := create(t, p, spec)
	proc, err := b.Exec(t.Context(), sandbox.Command{Args: []string{"sh", "-c", `
		i=0; while [ $i -lt 500 ]; do sleep 1000 & i=$((i+1)); done; echo all of them; wait`}})
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(proc.Stderr()).ReadString('\n')
	if err != nil || !strings.Contains(line, "fork") {
		t.Errorf("the shell says %q, %v, want that it cannot fork", line, err)
	}
	if got := processCount(t, b); got == 0 || got > 64 {
		t.Errorf("%d processes and threads, want at most 64", got)
	}
	if alive, err := b.Running(t.Context()); !alive || err != nil {
		t.Errorf("the sandbox runs: %v, %v", alive, err)
	}
	began := time.Now()
	if err := p.Terminate(t.Context(), spec.ID, true); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("it takes %s to end", took)
	}
	if code, err := proc.Wait(); code != -1 || err != nil {
		t.Errorf("the bomb ended with %d, %v", code, err)
	}
}

// processCount asks the engine, because the sandbox has no room for another process.
func processCount(t *testing.T, b *box) int {
	t.Helper()
	stats, err := b.p.api.ContainerStatsOneShot(t.Context(), b.container)
	if err != nil {
		t.Fatal(err)
	}
	defer stats.Body.Close() //nolint:errcheck // only read from
	return pidsOf(t, stats.Body)
}

// A busy loop gets no more than its share of a CPU.
func TestCPULimit(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	spec := newSpec(t)
	spec.Limits.CPUs = 0.2
	b := create(t, p, spec)
	out, errs, code := sh(t, b, `
		now() { read up rest </proc/uptime; echo ${up%.*}${up#*.}; }
		used() { if [ -r /sys/fs/cgroup/cpu.stat ]; then sed -n 's/^usage_usec \(.*\)/\1/p' /sys/fs/cgroup/cpu.stat; else echo $(($(cat /sys/fs/cgroup/cpuacct/cpuacct.usage)/1000)); fi; }
		(while :; do :; done) & one=$!
		(while :; do :; done) & two=$!
		t0=$(now); u0=$(used)
		sleep 3
		u1=$(used); t1=$(now)
		kill $one $two
		echo $((u1-u0)) $(((t1-t0)*10000))`)
	f := strings.Fields(out)
	if code != 0 || len(f) != 2 {
		t.Fatalf("%q, code %d: %s", out, code, errs)
	}
	used, wall := parseUintOrZero(f[0]), parseUintOrZero(f[1])
	if ratio := float64(used) / float64(wall); wall == 0 || ratio > 0.25 {
		t.Errorf("used %d µs of %d: %.2f, want at most 0.2 and a little", used, wall, ratio)
	}
	if out, _, _ := sh(t, b, `cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null || cut -d' ' -f1 /sys/fs/cgroup/cpu.max`); out != "20000" {
		t.Errorf("the quota is %s µs in 100 ms", out)
	}
}

// A sandbox whose limit is higher than the engine's CPUs gets all of them.
func TestCPULimit_IsAtMostThatOfTheEngine(t *testing.T) {
	t.Parallel()
	spec := newSpec(t)
	spec.Limits.CPUs = 4096
	p := provide(t, needEngine(t))
	b := create(t, p, spec)
	info, err := p.api.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if out, _, _ := sh(t, b, `cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null || cut -d' ' -f1 /sys/fs/cgroup/cpu.max`); out != strconv.Itoa(info.NCPU*100000) {
		t.Errorf("the quota is %s µs in 100 ms, the engine has %d processors", out, info.NCPU)
	}
}

// A file system in memory has exactly its configured size.
func TestTmpIsFull(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	cfg.TmpBytes = 8 << 20
	b := create(t, provide(t, cfg), newSpec(t))
	for _, dir := range []string{"/tmp", "$HOME"} {
		if _, errs, code := sh(t, b, `head -c 20000000 /dev/zero >"`+dir+`/big"`); code == 0 || !strings.Contains(errs, "No space left") {
			t.Errorf("%s takes 20 MB: code %d, %s", dir, code, errs)
		}
	}
	if _, err := os.Stat("/tmp/big"); err == nil {
		t.Error("the sandbox writes to the machine's own folder")
	}
}

func pidsOf(t *testing.T, body io.Reader) int {
	t.Helper()
	var s container.StatsResponse
	if err := json.NewDecoder(body).Decode(&s); err != nil {
		t.Fatal(err)
	}
	return int(s.PidsStats.Current) //nolint:gosec // bounded by the limit
}

// The runner ends a turn that fills the disk, with a message, and further turns run after files were removed.
func TestDiskLimit(t *testing.T) {
	t.Parallel()
	spec := newSpec(t)
	spec.Limits.DiskBytes = 8 << 20
	b := create(t, provide(t, needEngine(t)), spec)
	proc, stream := attached(t, b)
	in, out := json.NewEncoder(stream), json.NewDecoder(stream)
	start := func(id uint64, execution, script string) {
		t.Helper()
		if err := in.Encode(runner.Command{ID: id, Op: runner.OpStart, Epoch: 1, Query: &runner.Query{
			SessionID: spec.Labels.Session, ExecutionID: execution, Attempt: 1, Architecture: "acp", Command: []string{"sh", "-c", script},
			Content: "fill the disk",
		}}); err != nil {
			t.Fatal(err)
		}
	}
	next := func(wantedSkill func(runner.Message) bool) runner.Message {
		t.Helper()
		for {
			var m runner.Message
			if err := out.Decode(&m); err != nil {
				t.Fatal(err)
			}
			if wantedSkill(m) {
				return m
			}
		}
	}
	start(1, newID(t, events.KindExecution), `head -c 64000000 /dev/zero >big; exec sleep 1000`)
	m := next(func(m runner.Message) bool { return m.Line != nil && m.Line.Type == runner.TurnEnded })
	var end runner.TurnEnd
	if err := json.Unmarshal(m.Line.Data, &end); err != nil || end.Outcome != runner.OutcomeFailed || end.Code != "DISK_LIMIT" {
		t.Errorf("the turn ended with %+v, %v", end, err)
	}
	if out, _, _ := sh(t, b, `grep -lx -e sleep -e head /proc/[0-9]*/comm 2>/dev/null | wc -l`); out != "0" {
		t.Errorf("%s of its processes live on", out)
	}
	start(2, newID(t, events.KindExecution), `exec sleep 1000`)
	m = next(func(m runner.Message) bool { return m.Reply != nil && m.Reply.ID == 2 })
	if m.Reply.Error == nil || m.Reply.Error.Code != "DISK_LIMIT" {
		t.Errorf("with a full disk, another turn is answered with %+v", m.Reply)
	}
	if err := proc.Kill(); err != nil {
		t.Error(err)
	}
	if _, err := proc.Wait(); err != nil {
		t.Error(err)
	}
}
