package docker

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/system"
	"github.com/docker/docker/api/types/volume"

	"github.com/spoolhq/spool/pkg/sandbox"
)

func TestParseUsers(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]UserRange{"70000-99999": {70000, 99999}, "20000-20000": {20000, 20000}, "200000-265535": {200000, 265535}} {
		if got, err := ParseUserRange(text); got != want || err != nil {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	for text, says := range map[string]string{
		"": "not a range", "20000": "not a range", "a-b": "not a range", "2-": "not a range", "30000-20000": "is empty", "999-2000": "not between", "20000-3000000": "not between",
		"10001-10001": "services' user", "10002-20000": "egress proxy's", "60000-70000": "nobody", "65535-70000": "invalid",
	} {
		if _, err := ParseUserRange(text); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", text, err, says)
		}
	}
}

func TestAccount_FileHasTheUserOnce(t *testing.T) {
	t.Parallel()
	passwd := []byte("root:x:0:0:root:/root:/bin/bash\nagent:x:10001:10001::/home/old:/bin/zsh\nother:x:70001:70001::/:/bin/sh\n\nbroken\nlast:x:5:5::/:/bin/sh")
	for name, want := range map[string]string{
		"agent": "root:x:0:0:root:/root:/bin/bash\nlast:x:5:5::/:/bin/sh\nagent:x:70001:70001::/home/old:/bin/zsh\n",
		"5":     "root:x:0:0:root:/root:/bin/bash\nagent:x:10001:10001::/home/old:/bin/zsh\nlast:x:70001:70001::/:/bin/sh\n",
		"99":    "root:x:0:0:root:/root:/bin/bash\nlast:x:5:5::/:/bin/sh\nagent:x:70001:70001::/home/spool:/bin/sh\n",
	} {
		if got := string(accountOf(passwd, name).accountFile("passwd", passwd, 70001)); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if got := string(account{name: "agent"}.accountFile("group", []byte("root:x:0:\nagent:x:10001:\n"), 70001)); got != "root:x:0:\nagent:x:70001:\n" {
		t.Errorf("group: %q", got)
	}
}

// userIn returns the number of the user in a sandbox, and checks that the user owns its workspace and records.
func userIn(t *testing.T, b *box) int {
	t.Helper()
	out, errs, _ := sh(t, b, `id -u; id -g; id -G; stat -c '%u %g' /workspace; stat -c '%u %g' "$HOME"; stat -c '%u %g' /spool/state`)
	id, _, _ := strings.Cut(out, "\n")
	n, err := strconv.Atoi(id)
	if err != nil || out != id+"\n"+id+"\n"+id+strings.Repeat("\n"+id+" "+id, 3) {
		t.Fatalf("users and owners: %q (%s)", out, errs)
	}
	return n
}

// hasReservation reports whether a user's volume is on the engine.
func hasReservation(t *testing.T, p *Provider, id int) bool {
	t.Helper()
	return exists(t, p, userVolumeName(id))[0]
}

// A session's workspace keeps its user from sandbox to sandbox. The user is released once, with the workspace.
func TestUser_BelongsToTheWorkspace(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	p := provide(t, cfg)
	first, other := newSpec(t), newSpec(t)
	a := create(t, p, first)
	id := userIn(t, a)
	if id < 70000 || id > 99999 {
		t.Errorf("user %d is not of the default range", id)
	}
	if userIn(t, create(t, p, other)) == id {
		t.Error("two sandboxes have the same user")
	}
	if out, _, _ := sh(t, a, `echo secret >mine && chmod 600 mine`); out != "" {
		t.Fatal(out)
	}
	killRunner(t, p, first.ID)
	if got := userIn(t, create(t, p, first)); got != id {
		t.Errorf("started again as user %d, was %d", got, id)
	}
	if err := p.Terminate(t.Context(), first.ID, false); err != nil {
		t.Fatal(err)
	}
	if !hasReservation(t, p, id) {
		t.Error("the user of a kept workspace was released")
	}
	// Another executor, with other settings.
	cfg.Users = UserRange{20000, 20009}
	second := newSpec(t)
	second.Workspace = first.ID
	next := provide(t, cfg)
	b := create(t, next, second)
	if got := userIn(t, b); got != id || !b.HasWorkspace() {
		t.Errorf("kept %v, as user %d, was %d", b.HasWorkspace(), got, id)
	}
	if out, _, _ := sh(t, b, `cat mine`); out != "secret" {
		t.Errorf("a file of the sandbox before: %q", out)
	}
	if gone, err := p.removeVolume(t.Context(), userVolumeName(id)); gone || err != nil {
		t.Errorf("a reservation in use was removed: %v", err)
	}
	if err := p.Terminate(t.Context(), second.ID, true); err != nil {
		t.Fatal(err)
	}
	if hasReservation(t, p, id) {
		t.Error("the user stays reserved without a workspace")
	}
}

// Executors that create sandboxes concurrently share no user. When all users are taken, the next sandbox is refused.
func TestUser_OfOneSandboxAlone(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	cfg.Users = UserRange{30000, 30002}
	type result struct {
		spec sandbox.Spec
		box  *box
		err  error
	}
	results := make(chan result, 6)
	for range 6 {
		p, spec := provide(t, cfg), newSpec(t)
		go func() {
			b, err := p.Create(t.Context(), spec)
			made, _ := b.(*box)
			results <- result{spec, made, err}
		}()
	}
	p := provide(t, cfg)
	users := map[int]sandbox.Spec{}
	for range 6 {
		r := <-results
		if r.err != nil {
			wantCode(t, "no user is left", r.err, sandbox.CodeSandboxFailed, "SPOOL_SANDBOX_UIDS, 30000-30002")
			continue
		}
		t.Cleanup(func() {
			if err := p.Terminate(context.Background(), r.spec.ID, true); err != nil {
				t.Error(err)
			}
		})
		id := userIn(t, r.box)
		if taken, ok := users[id]; ok {
			t.Errorf("user %d has sandboxes %s and %s", id, taken.ID, r.spec.ID)
		}
		users[id] = r.spec
	}
	if len(users) != 3 {
		t.Fatalf("users: %v, want 3", users)
	}
	for id, spec := range users {
		if err := p.Terminate(t.Context(), spec.ID, true); err != nil {
			t.Fatal(err)
		}
		if got := userIn(t, create(t, p, newSpec(t))); got != id {
			t.Errorf("the released user is %d, the next sandbox's %d", id, got)
		}
		break
	}
}

// A workspace of a release in which all sandboxes shared a user keeps that user.
func TestUser_OfAnEarlierWorkspace(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	earlier := newSpec(t)
	owned := map[string]string{labelVersion: labelsVersion, labelRole: roleVolume, labelEngine: p.cfg.Engine, labelVolumesOwner: earlier.ID}
	for _, v := range []string{workspaceVolumeName(earlier.ID), stateVolumeName(earlier.ID)} {
		if err := p.createVolume(t.Context(), v, owned); err != nil {
			t.Fatal(err)
		}
	}
	err := p.prepareVolumes(t.Context(), imageInfo{ref: testImage}, user{id: earlierReleaseUser}, "", "",
		volumeFolder{helperVolume{workspaceVolumeName(earlier.ID), "work"}, 0o700}, volumeFolder{helperVolume{stateVolumeName(earlier.ID), "state"}, 0o700})
	if err != nil {
		t.Fatal(err)
	}
	spec := newSpec(t)
	spec.Workspace = earlier.ID
	b := create(t, p, spec)
	if id := userIn(t, b); id != earlierReleaseUser || !b.HasWorkspace() {
		t.Errorf("user %d, kept %v", id, b.HasWorkspace())
	}
}

// The sweep releases the users that an executor that died has reserved, unless their workspace exists.
func TestUser_LeftReserved(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	cfg.Engine = engine + "-users" // the sweep must not meet other tests' sandboxes
	p := provide(t, cfg)
	kept := newSpec(t)
	kept.Labels.Engine = cfg.Engine
	b := create(t, p, kept)
	id := userIn(t, b)
	left, err := p.reserveNewUser(t.Context(), p.reservationLabels(newSpec(t).ID))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.RemoveOrphans(t.Context(), time.Hour); err != nil || !hasReservation(t, p, left.id) {
		t.Errorf("within the hour the user was released, %v", err)
	}
	time.Sleep(1100 * time.Millisecond) // the engine's dates are whole seconds
	if _, err := p.RemoveOrphans(t.Context(), 0); err != nil || hasReservation(t, p, left.id) || !hasReservation(t, p, id) {
		t.Errorf("left behind: %v, of a sandbox: %v, %v", hasReservation(t, p, left.id), hasReservation(t, p, id), err)
	}
	if err := p.Terminate(t.Context(), kept.ID, false); err != nil {
		t.Fatal(err)
	}
	if _, err := p.RemoveOrphans(t.Context(), time.Hour); err != nil || !hasReservation(t, p, id) {
		t.Errorf("the user of a kept workspace was released: %v", err)
	}
	time.Sleep(1100 * time.Millisecond)
	if _, err := p.RemoveOrphans(t.Context(), 0); err != nil || hasReservation(t, p, id) {
		t.Errorf("the user stays without its workspace: %v", err)
	}
}

// A volume that the engine created in place of a reservation, for a container that started too late, does not block a
// user.
func TestUser_AfterAVolumeOfTheEngine(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	cfg.Users = UserRange{30010, 30010}
	p := provide(t, cfg)
	if _, err := p.api.VolumeCreate(t.Context(), volume.CreateOptions{Name: userVolumeName(30010)}); err != nil {
		t.Fatal(err)
	}
	spec := newSpec(t)
	if id := userIn(t, create(t, p, spec)); id != 30010 {
		t.Errorf("user %d", id)
	}
	if err := p.checkUserVolume(t.Context(), user{id: 30010, dir: "/"}, p.reservationLabels(newSpec(t).ID)); !errors.Is(err, errVanished) {
		t.Errorf("another sandbox's reservation counts: %v", err)
	}
}

func TestAccountFiles_ReplacedMeanwhileAreWrittenAgain(t *testing.T) {
	t.Parallel()
	for message, again := range map[string]bool{
		"Error processing tar file(exit status 1): lchown /v/user/69fb76aaccf8.passwd: no such file or directory": true,
		"Error processing tar file(exit status 1): write /v/user/69fb76aaccf8.passwd: no space left on device":    false,
		"Error processing tar file(exit status 1): lchown /v/workspace: no such file or directory":                false,
	} {
		if err := wrapReplacedAccountFile(errors.New(message)); errors.Is(err, errVanished) != again {
			t.Errorf("%s: wrapped as %v", message, err)
		}
	}
	if err := wrapReplacedAccountFile(nil); err != nil {
		t.Error(err)
	}
}

// Concurrent creations of one sandbox leave one reservation.
func TestUser_OfASandboxMadeTwice(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	spec := newSpec(t)
	var all sync.WaitGroup
	for range 4 {
		p := provide(t, cfg)
		all.Go(func() {
			if _, err := p.Create(t.Context(), spec); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	p := provide(t, cfg)
	id := userIn(t, create(t, p, spec))
	list, err := p.reservedUserVolumes(t.Context(), labelVolumesOwner+"="+spec.ID)
	if err != nil || len(list) != 1 || list[0].Name != userVolumeName(id) {
		t.Errorf("reservations of user %d: %v, %v", id, list, err)
	}
}

// Programs find the user in the image's files of accounts, also if the image has none.
func TestUser_HasAnAccount(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	spec := newSpec(t)
	b := create(t, p, spec)
	id := strconv.Itoa(userIn(t, b))
	for line, want := range map[string]string{
		`id -un; id -gn`:                     "agent\nagent",
		`getent passwd ` + id:                "agent:x:" + id + ":" + id + "::/home/spool:/bin/sh",
		`getent passwd root | cut -d: -f1,3`: "root:0",
		`echo x >>/etc/passwd; echo y 2>&1`:  "y",
		`grep -c "^agent:" /etc/passwd`:      "1",
		`env -i sh -c 'cd ~agent; pwd'`:      "/home/spool",
		`stat -c '%U %a' /workspace`:         "agent 700",
		`touch /spool/user/x 2>/dev/null; ls /spool/user | grep -c '\.passwd$'`: "1",
	} {
		if out, errs, _ := sh(t, b, line); out != want {
			t.Errorf("%s: %q, want %q (%s)", line, out, want, errs)
		}
	}
}

// The programs of Spool's image, which look up their user in several ways, work with a user that the image does not
// have.
func TestUser_IsFoundByPrograms(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	p := provide(t, cfg)
	if _, err := p.api.ImageInspect(t.Context(), layerImage); err != nil {
		t.Skipf("needs the image %s (scripts/images): %v", layerImage, err)
	}
	spec := newSpec(t)
	spec.Image = layerImage
	b := create(t, p, spec)
	id := strconv.Itoa(userIn(t, b))
	for line, want := range map[string]string{
		`grep "^agent:" /etc/passwd /etc/group`: "/etc/passwd:agent:x:" + id + ":" + id + "::/home/spool:/bin/bash\n/etc/group:agent:x:" + id + ":",
		`env -u USER -u LOGNAME python3 -c 'import getpass, os; print(getpass.getuser(), os.path.expanduser("~agent"))'`: "agent /home/spool",
		`node -p 'const u = require("os").userInfo(); [u.username, u.uid, u.homedir, u.shell].join(" ")'`:                "agent " + id + " /home/spool /bin/bash",
		`ssh -G example.com | grep '^user '`:                                       "user agent",
		`ssh-keygen -q -t ed25519 -N "" -f /tmp/key && cut -d' ' -f3 /tmp/key.pub`: "agent@sandbox",
		`git init -q repo && cd repo && git -c user.name=a -c user.email=a@b.c commit -q --allow-empty -m x && git log --format=%s && rm -r ../repo`: "x",
		`python3 -m venv /tmp/venv && /tmp/venv/bin/pip --version | cut -d' ' -f1`:                                                                   "pip",
		`npm config get cache`:                 "/home/spool/.npm",
		`touch f && ls -l f | cut -d' ' -f3,4`: "agent agent",
		`for c in claude codex opencode; do $c --version >/dev/null 2>&1 || echo $c fails; done; echo over`: "over",
	} {
		if out, errs, _ := sh(t, b, line); out != want {
			t.Errorf("%s: %q, want %q (%s)", line, out, want, errs)
		}
	}
}

// An engine that maps users has no numbers above 16 bits: Spool refuses the range with a message before the kernel
// does.
func TestUsers_OfAnEngineThatMapsThem(t *testing.T) {
	t.Parallel()
	high, low := provide(t, Config{Engine: "e", Runner: "r"}), provide(t, Config{Engine: "e", Runner: "r", Users: UserRange{20000, 59999}})
	for option, mapped := range map[string]bool{"name=rootless": true, "name=userns": true, "name=seccomp,profile=builtin": false} {
		info := system.Info{SecurityOptions: []string{"name=cgroupns", option}}
		if err := low.checkUsers(info); err != nil {
			t.Errorf("%s: %v", option, err)
		}
		err := high.checkUsers(info)
		if mapped {
			wantCode(t, option, err, sandbox.CodeSandboxFailed, "set SPOOL_SANDBOX_UIDS, which is 70000-99999")
		} else if err != nil {
			t.Errorf("%s: %v", option, err)
		}
	}
}
