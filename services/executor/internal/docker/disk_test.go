package docker

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/volume"
	"golang.org/x/sys/unix"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// needLoop returns a config for an engine of this machine that enforces limits with loop devices.
func needLoop(t testing.TB) Config {
	t.Helper()
	cfg := needEngine(t)
	if os.Getuid() != 0 {
		t.Skip("only root sees the engine's loop devices")
	}
	if cfg.DiskLimit != DiskLimitLoop {
		t.Skipf("the engine enforces disk limits by %s, not by %s", cfg.DiskLimit, DiskLimitLoop)
	}
	return cfg
}

// engineFree returns the free space of the engine's file system, in bytes.
func engineFree(t testing.TB, p *Provider) int64 {
	t.Helper()
	info, err := p.api.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(info.DockerRootDir, &fs); err != nil {
		t.Fatal(err)
	}
	return int64(fs.Bavail) * fs.Bsize //nolint:gosec // what a disk has
}

// loops returns the loop devices whose name contains a text, by name.
func loops(t testing.TB, text string) map[string]string {
	t.Helper()
	list, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, path := range list {
		device := "/dev/" + filepath.Base(filepath.Dir(filepath.Dir(path)))
		f, err := os.Open(device)
		if err != nil {
			t.Fatal(err)
		}
		info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
		if cerr := f.Close(); cerr != nil {
			t.Fatal(cerr)
		}
		if errors.Is(err, unix.ENXIO) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if name := unix.ByteSliceToString(info.File_name[:]); strings.Contains(name, text) {
			out[name] = device
		}
	}
	return out
}

// detach detaches the files from loop devices, as a reboot does.
func detach(t testing.TB, devices map[string]string) {
	t.Helper()
	for name, device := range devices {
		f, err := os.OpenFile(device, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0), f.Close()); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(diskNodeDir + strings.TrimPrefix(name, "spool:")); err != nil {
			t.Fatal(err)
		}
	}
}

// until waits until the condition holds.
func until(t testing.TB, what string, fact func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !fact(); time.Sleep(enginePollInterval) {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not come", what)
		}
	}
}

// Writes beyond the limit fail at once, in the workspace and in the agent's records, and do not take the engine's disk
// space.
func TestDiskLimit_RefusesMoreBytes(t *testing.T) {
	t.Parallel()
	p := provide(t, needLoop(t))
	spec := newSpec(t)
	spec.Limits.DiskBytes = 4 << 30
	b := create(t, p, spec)
	for _, dir := range []string{workspaceDir, stateDir} {
		before := engineFree(t, p)
		out, errs, code := sh(t, b, "fallocate -l 12G "+dir+"/large; rc=$?; stat -c %b "+dir+"/large; exit $rc")
		if blocks, err := strconv.ParseInt(out, 10, 64); code == 0 || !strings.Contains(errs, "No space left") || err != nil || blocks*512 > 5<<30 {
			t.Errorf("%s: three times the limit: code %d, %s blocks, %s", dir, code, out, errs)
		}
		// Other tests write too.
		if fell := before - engineFree(t, p); fell > 2<<30 {
			t.Errorf("%s: the engine has %d bytes less", dir, fell)
		}
	}
	// Data within the limit can be written, and freed space can be used again.
	line := "rm -f large " + stateDir + "/large; for n in 1 2 3; do head -c 1G /dev/zero >kept || exit 1; rm kept; done; head -c 64M /dev/zero >kept && stat -c %s kept"
	if out, errs, code := sh(t, b, line); code != 0 || out != strconv.Itoa(64<<20) {
		t.Errorf("within the limit: code %d, %s, %s", code, out, errs)
	}
}

// Space that a sandbox frees is returned to the engine.
func TestDiskLimit_FreedSpaceReturns(t *testing.T) {
	t.Parallel()
	p := provide(t, needLoop(t))
	b := create(t, p, newSpec(t))
	v, err := p.api.VolumeInspect(t.Context(), workspaceVolumeName(b.id))
	if err != nil {
		t.Fatal(err)
	}
	taken := func() int64 {
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(filepath.Dir(v.Mountpoint), "disk.img"), &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks * 512
	}
	empty := taken()
	if empty > 64<<20 {
		t.Errorf("an empty workspace takes %d bytes", empty)
	}
	if _, errs, code := sh(t, b, "head -c 256M /dev/urandom >large && sync large"); code != 0 {
		t.Fatal(errs)
	}
	if full := taken(); full < 256<<20 {
		t.Errorf("with 256 MiB in it it takes %d bytes", full)
	}
	if _, errs, code := sh(t, b, "rm large && sync"); code != 0 {
		t.Fatal(errs)
	}
	until(t, "the space", func() bool { return taken() < empty+128<<20 })
}

// Files beyond the limit are refused, and another sandbox can still create files.
func TestDiskLimit_RefusesMoreFiles(t *testing.T) {
	t.Parallel()
	cfg := needLoop(t)
	cfg.Files = 20_000
	p := provide(t, cfg)
	b, other := create(t, p, newSpec(t)), create(t, p, newSpec(t))
	for _, dir := range []string{workspaceDir, stateDir} {
		_, errs, code := sh(t, b, "cd "+dir+" && mkdir many && cd many && seq 1000000 | xargs touch 2>&1 | grep -m1 -q 'No space left' && echo refused >&2; exit 1")
		out, _, _ := sh(t, b, "ls -U "+dir+"/many | wc -l")
		if n, err := strconv.Atoi(out); code == 0 || errs != "refused" || err != nil || n > 25_000 || n < 19_000 {
			t.Errorf("%s: a million files: %s were made, %s", dir, out, errs)
		}
	}
	if out, errs, code := sh(t, other, "touch one && ls"); out != "one" || code != 0 {
		t.Errorf("another sandbox: %q, %s", out, errs)
	}
	// The full sandbox runs, and its files can be listed.
	if list, err := b.Files().List(t.Context(), ""); err != nil || len(list) < 19_000 {
		t.Errorf("%d files in the full workspace, %v", len(list), err)
	}
	if _, errs, code := sh(t, b, "rm -rf many "+stateDir+"/many && touch one"); code != 0 {
		t.Errorf("after the files were removed: %s", errs)
	}
}

// Loop devices end with a reboot of the engine's machine. A sandbox gets its own files back, although another sandbox
// has its former devices.
func TestDiskLimit_SurvivesTheMachine(t *testing.T) {
	t.Parallel()
	p := provide(t, needLoop(t))
	spec := newSpec(t)
	b := create(t, p, spec)
	if _, errs, code := sh(t, b, "echo mine >mark && sync"); code != 0 {
		t.Fatal(errs)
	}
	killRunner(t, p, spec.ID)
	before := loops(t, spec.ID)
	if len(before) != 2 {
		t.Fatalf("the loop devices are %v", before)
	}
	detach(t, before)
	other := create(t, p, newSpec(t))
	if _, errs, code := sh(t, other, "echo theirs >mark && sync"); code != 0 {
		t.Fatal(errs)
	}
	again, err := p.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	if out, errs, _ := sh(t, again, "cat mark"); out != "mine" {
		t.Errorf("the mark is %q, %s", out, errs)
	}
	if out, errs, _ := sh(t, other, "cat mark"); out != "theirs" {
		t.Errorf("the other's mark is %q, %s", out, errs)
	}
	// The same holds for a sandbox that takes the workspace over, created by another executor.
	if err := p.Terminate(t.Context(), spec.ID, false); err != nil {
		t.Fatal(err)
	}
	detach(t, loops(t, spec.ID))
	next := newSpec(t)
	next.Workspace = spec.ID
	heir := create(t, provide(t, p.cfg), next)
	if out, errs, _ := sh(t, heir, "cat mark"); out != "mine" || !heir.HasWorkspace() {
		t.Errorf("taken over, the mark is %q, %s", out, errs)
	}
}

// A removed sandbox leaves no loop device and no node.
func TestDiskLimit_NothingStays(t *testing.T) {
	t.Parallel()
	p := provide(t, needLoop(t))
	b := create(t, p, newSpec(t))
	if n := loops(t, b.id); len(n) != 2 {
		t.Fatalf("the loop devices are %v", n)
	}
	if err := p.Terminate(t.Context(), b.id, true); err != nil {
		t.Fatal(err)
	}
	until(t, "the end of the loop devices", func() bool { return len(loops(t, b.id)) == 0 })
	for _, v := range []string{workspaceVolumeName(b.id), stateVolumeName(b.id)} {
		until(t, "the end of the node of "+v, func() bool {
			_, err := os.Lstat(diskNodeDir + v)
			return errors.Is(err, os.ErrNotExist)
		})
	}
}

// asCreator makes the test binary create sandboxes until it is killed. Its value is the engine's name.
const asCreator = "SPOOL_DOCKER_TEST_CREATOR"

func createForever() int {
	p, err := New(withRequired(Config{Engine: os.Getenv(asCreator), Runner: os.Getenv(asCreator + "_RUNNER"), Image: testImage, DiskLimit: DiskLimitLoop}))
	for err == nil {
		var id, session string
		id, err = events.NewID(events.KindSandbox, time.Now(), rand.Reader)
		if err == nil {
			session = events.DeriveID(events.KindSession, id)
			_, err = p.Create(context.Background(), sandbox.Spec{ID: id, Labels: sandbox.Labels{Tenant: "default", Session: session, Engine: p.cfg.Engine, Epoch: 1}})
		}
		if err == nil {
			err = p.Terminate(context.Background(), id, true)
		}
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// The sweep removes everything that an executor leaves when it is killed at any moment.
func TestDiskLimit_KilledExecutorLeavesNothing(t *testing.T) {
	t.Parallel()
	cfg := needLoop(t)
	cfg.Engine += "-killed"
	p := provide(t, cfg)
	ours := filters.NewArgs(filters.Arg("label", labelEngine+"="+cfg.Engine))
	var names []string
	for n := range 6 {
		cmd := exec.CommandContext(t.Context(), os.Args[0]) //nolint:gosec // this test
		cmd.Env = append(os.Environ(), asCreator+"="+cfg.Engine, asCreator+"_RUNNER="+cfg.Runner)
		var said bytes.Buffer
		cmd.Stderr = &said
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		until(t, "a volume of the executor", func() bool {
			list, err := p.api.VolumeList(t.Context(), volume.ListOptions{Filters: filters.NewArgs(filters.Arg("label", labelEngine+"="+cfg.Engine), filters.Arg("label", labelRole+"="+roleVolume))})
			for _, v := range list.Volumes {
				names = append(names, v.Name)
			}
			return err == nil && len(list.Volumes) > 0
		})
		time.Sleep(time.Duration(n) * 150 * time.Millisecond) // somewhere else each time; any moment will do
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err == nil || said.Len() > 0 {
			t.Fatalf("the executor ended by itself: %v, %s", err, said.String())
		}
	}
	// First the engine finishes its requests, then a new executor sweeps.
	until(t, "the end of what was left", func() bool {
		list, err := p.List(t.Context())
		for _, i := range list {
			err = errors.Join(err, p.Terminate(t.Context(), i.ID, true))
		}
		q := provide(t, cfg)
		_, oerr := q.RemoveOrphans(t.Context(), 0)
		if err := errors.Join(err, oerr); err != nil {
			t.Log(err)
			return false
		}
		containers, err := p.api.ContainerList(t.Context(), container.ListOptions{All: true, Filters: ours})
		volumes, verr := p.api.VolumeList(t.Context(), volume.ListOptions{Filters: filters.NewArgs(filters.Arg("label", labelEngine+"="+cfg.Engine), filters.Arg("label", labelRole+"="+roleVolume))})
		if err := errors.Join(err, verr); err != nil {
			t.Fatal(err)
		}
		return len(containers) == 0 && len(volumes.Volumes) == 0
	})
	if len(names) == 0 {
		t.Fatal("no volume was seen")
	}
	for _, name := range names {
		until(t, "the end of the loop device and the node of "+name, func() bool {
			if _, err := os.Lstat(diskNodeDir + name); len(loops(t, name)) == 0 && errors.Is(err, os.ErrNotExist) {
				return true
			}
			if err := p.sweepLoopDevices(t.Context()); err != nil { // what ended after the sweep goes with the next
				t.Log(err)
			}
			return false
		})
	}
}

// Existing workspaces keep their kind of volume when the setting changes.
func TestDiskLimit_TakesOverOtherVolumes(t *testing.T) {
	t.Parallel()
	loop := needLoop(t)
	watch := loop
	watch.DiskLimit = DiskLimitWatch
	for name, pair := range map[string][2]Config{"watch to loop": {watch, loop}, "loop to watch": {loop, watch}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			first, next := newSpec(t), newSpec(t)
			p := provide(t, pair[0])
			b := create(t, p, first)
			kind, _, _ := sh(t, b, "echo here >mark; stat -f -c %S%T .")
			if err := p.Terminate(t.Context(), first.ID, false); err != nil {
				t.Fatal(err)
			}
			next.Workspace = first.ID
			heir := create(t, provide(t, pair[1]), next)
			if out, errs, _ := sh(t, heir, "cat mark; stat -f -c %S%T ."); out != "here\n"+kind {
				t.Errorf("inside it is %q, want %q, %s", out, kind, errs)
			}
		})
	}
}

// The mode is proved on the engine. A mode that does not work returns an error that names the setting.
func TestChooseDiskLimit(t *testing.T) {
	t.Parallel()
	cfg := needLoop(t)
	cfg.DiskLimit = DiskLimitAuto
	p := provide(t, cfg)
	if mode, err := p.ChooseDiskLimit(t.Context()); mode != DiskLimitLoop || err != nil || p.DiskLimit() != mode {
		t.Errorf("auto is %s (%s), %v", mode, p.DiskLimit(), err)
	}
	// Without mkfs in the image there are no loop devices.
	ref := "spool-test:without-mkfs"
	bare(t, p, ref, "amd64")
	cfg.Image, cfg.DiskLimit = ref, DiskLimitLoop
	if mode, err := provide(t, cfg).ChooseDiskLimit(t.Context()); err == nil || !strings.Contains(err.Error(), "SPOOL_SANDBOX_DISK_LIMIT") || !strings.Contains(err.Error(), "e2fsprogs") {
		t.Errorf("without mkfs.ext4: %s, %v", mode, err)
	}
	var log bytes.Buffer
	cfg.DiskLimit, cfg.Logger = DiskLimitAuto, slog.New(slog.NewTextHandler(&log, nil))
	q := provide(t, cfg)
	mode, err := q.ChooseDiskLimit(t.Context())
	if err != nil || mode == DiskLimitLoop {
		t.Errorf("auto without mkfs.ext4: %s, %v", mode, err)
	}
	if mode == DiskLimitWatch && !strings.Contains(log.String(), "level=WARN") {
		t.Errorf("nobody is warned: %s", log.String())
	}
	// If the engine does not answer, the error does not concern the mode.
	cfg.Host, cfg.DiskLimit = "unix:///nowhere", DiskLimitLoop
	_, err = provide(t, cfg).ChooseDiskLimit(t.Context())
	wantCode(t, "without an engine", err, sandbox.CodeEngineUnavailable, "start it")
	if _, err := New(withRequired(Config{Engine: engine, Runner: "none", DiskLimit: "hope"})); err == nil || !strings.Contains(err.Error(), "hope") {
		t.Errorf("a mode that there is not: %v", err)
	}
	if _, err := New(withRequired(Config{Engine: engine, Runner: "none", Files: -1})); err == nil || !strings.Contains(err.Error(), "Files") {
		t.Errorf("fewer files than none: %v", err)
	}
}

// The proof fails if nothing enforces the limits.
func TestExceed_NoticesThatNothingIsEnforced(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	b := create(t, p, newSpec(t)) // copies the runner
	pic, err := p.lookUpAllowedImage(t.Context(), imageFields, testImage)
	if err != nil {
		t.Fatal(err)
	}
	r, err := p.runnerForImage(pic)
	if err != nil {
		t.Fatal(err)
	}
	name := namePrefix + "unlimited-" + strings.ToLower(b.id)
	if err := p.createVolumesInMode(t.Context(), DiskLimitWatch, probeVolumeBytes, probeVolumeFiles, map[string]string{labelEngine: engine}, name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.removeVolumes(context.Background(), name) })
	if err := p.prepareVolumes(t.Context(), imageInfo{ref: testImage}, probeUser, "", "", volumeFolder{helperVolume{name, "work"}, 0o700}); err != nil {
		t.Fatal(err)
	}
	if err := p.exceedLimits(t.Context(), pic, r, name, probeVolumeFiles); err == nil || !strings.Contains(err.Error(), "could be written") {
		t.Errorf("a volume without limits: %v", err)
	}
}

// Every writable folder in memory has an effective limit of bytes and of files.
func TestMemoryFolders_LimitFiles(t *testing.T) {
	t.Parallel()
	cfg := needEngine(t)
	cfg.TmpBytes = 8 << 20
	p := provide(t, cfg)
	b := create(t, p, newSpec(t))
	const flood = `for d in $(awk '$3 == "tmpfs" {print $2 " " $4}' /proc/mounts | sort -u | while read -r d o; do
		if test -d "$d" && test -w "$d"; then case "$o" in *size=*nr_inodes=*|*nr_inodes=*size=*) echo "$d";; *) echo "unlimited:$d" >&2;; esac; fi; done); do
		mkdir "$d/many" && (cd "$d/many" && seq 100000 | xargs touch 2>&1 | grep -m1 -q 'No space left'; ls -U | wc -l | xargs echo "$d"; cd .. && rm -rf many); done`
	out, errs, _ := sh(t, b, flood)
	seen := map[string]bool{}
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		seen[f[0]] = true
		if n, err := strconv.Atoi(f[1]); err != nil || n > 20_000 {
			t.Errorf("%s takes %s files", f[0], f[1])
		}
	}
	if errs != "" || !seen["/tmp"] || !seen[homeDir] || !seen[shmDir] || !seen[runDir] {
		t.Errorf("flooded were %q, %s", out, errs)
	}
	for dir, options := range p.serverTmpfs(imageInfo{volumes: []string{"/data"}}) {
		if !strings.Contains(options, "size=") || !strings.Contains(options, "nr_inodes=") {
			t.Errorf("an MCP server's %s has no limit: %s", dir, options)
		}
	}
}

// Processes inside cannot write to the container's log, whose size is limited as well.
func TestLogs_AreLimited(t *testing.T) {
	t.Parallel()
	p := provide(t, needEngine(t))
	b := create(t, p, newSpec(t))
	if out, _, code := sh(t, b, `for n in 1 2; do head -c 8M /dev/zero >/proc/1/fd/$n || exit 1; done; echo written`); code == 0 {
		t.Errorf("the first process's output can be written: %s", out)
	}
	got, err := p.api.ContainerInspect(t.Context(), b.container)
	if err != nil {
		t.Fatal(err)
	}
	if l := got.HostConfig.LogConfig; l.Type != "json-file" || l.Config["max-size"] != "1m" || l.Config["max-file"] != "1" {
		t.Errorf("the log is kept by %+v", l)
	}
}
