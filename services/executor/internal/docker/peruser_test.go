package docker

import (
	"strconv"
	"strings"
	"testing"
)

// exhaust makes a sandbox take inotify instances until it gets no more.
func exhaust(t *testing.T, b *box) {
	t.Helper()
	if out, errs, code := sh(t, b, `
		touch /tmp/followed
		most=$(($(cat /proc/sys/fs/inotify/max_user_instances) + 1))
		for n in $(seq $most); do tail -f /tmp/followed >/dev/null 2>>/tmp/said </dev/null & done
		until grep -q 'inotify cannot be used' /tmp/said; do sleep 0.1; done`); code != 0 {
		t.Fatalf("%s %s", out, errs)
	}
}

// watches reports whether a sandbox gets an inotify instance, with tail, which ends together with the given process.
func watches(t *testing.T, b *box) bool {
	t.Helper()
	out, errs, _ := sh(t, b, `touch /tmp/mine; sleep 0 & gone=$!; wait; tail -f --pid=$gone /tmp/mine 2>&1`)
	if errs != "" {
		t.Fatal(errs)
	}
	return !strings.Contains(out, "inotify cannot be used")
}

// The kernel counts inotify instances for each user: a sandbox that takes all of them does not take those of another
// tenant.
func TestInotify_OfATenantIsItsOwn(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	cfg.Limits.PIDs = 4096
	p := provide(t, cfg)
	greedy, other := newSpec(t), newSpec(t)
	other.Labels.Tenant = "another"
	a, b := create(t, p, greedy), create(t, p, other)
	if !watches(t, a) || !watches(t, b) {
		t.Fatal("a new sandbox gets no inotify instance")
	}
	exhaust(t, a)
	if watches(t, a) {
		t.Fatal("the sandbox has not taken all its inotify instances")
	}
	if !watches(t, b) {
		t.Error("a sandbox of another tenant gets no inotify instance")
	}
}

// Every sandbox has the same rlimits, for a process and for its user.
func TestUlimits(t *testing.T) {
	t.Parallel()
	b := create(t, provide(t, needEngine(t)), newSpec(t))
	out, _, _ := sh(t, b, `cat /proc/self/limits`)
	for name, want := range map[string]int64{
		"Max core file size": 0, "Max open files": 16384, "Max pending signals": 1024, "Max msgqueue size": 819200, "Max locked memory": 64 << 10,
	} {
		found := false
		for line := range strings.Lines(out) {
			if rest, ok := strings.CutPrefix(line, name); ok {
				f, n := strings.Fields(rest), strconv.FormatInt(want, 10)
				found = len(f) >= 2 && f[0] == n && f[1] == n
			}
		}
		if !found {
			t.Errorf("%s is not %d:\n%s", name, want, out)
		}
	}
}
