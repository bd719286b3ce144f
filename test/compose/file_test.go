package compose

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// file holds the parts of compose.yaml that tests check.
type file struct {
	Services map[string]struct {
		Image       string
		Command     []string
		GroupAdd    []string `json:"group_add"`
		Environment map[string]*string
		Networks    map[string]any
		Volumes     []struct{ Type, Source, Target string }
		Ports       []struct {
			HostIP    string `json:"host_ip"`
			Published string
			Target    int
		}
		ReadOnly    bool     `json:"read_only"`
		CapDrop     []string `json:"cap_drop"`
		SecurityOpt []string `json:"security_opt"`
		Deploy      struct {
			Resources struct{ Limits struct{ Pids int } }
		}
		Restart   string
		Build     struct{ Target string }
		DependsOn map[string]struct{ Condition string } `json:"depends_on"`
	}
	Networks map[string]struct{ Internal bool }
}

// config returns compose's configuration of its file with the settings of envFile, and with no other variables than
// env.
func config(t *testing.T, envFile string, env ...string) (string, error) {
	t.Helper()
	return configOf(t, []string{"deploy/compose.yaml"}, envFile, env...)
}

// configOf is like config for several files, of which each overrides the ones before.
func configOf(t *testing.T, files []string, envFile string, env ...string) (string, error) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "docker", "compose", "version").CombinedOutput(); err != nil {
		t.Skipf("docker has no compose plugin: run scripts/install engine: %s", out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	args := []string{"compose", "--env-file", envFile}
	for _, f := range files {
		args = append(args, "-f", f)
	}
	cmd := exec.CommandContext(ctx, "docker", append(args, "--profile", "mock", "config", "--format", "json")...) //nolint:gosec // the arguments are those of the test
	cmd.Dir = root
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME")}, env...)
	var said strings.Builder
	cmd.Stderr = &said
	out, err := cmd.Output()
	return string(out) + said.String(), err
}

// TestComposeFile_GrantsOnlyWhatIsNeeded tests that the engine's socket, the keys and outbound network access each
// belong to the one service that needs them.
func TestComposeFile_GrantsOnlyWhatIsNeeded(t *testing.T) {
	t.Parallel()
	out, err := config(t, "deploy/.env.example", "ANTHROPIC_API_KEY=sk-1", "OPENAI_API_KEY=sk-2", "NVIDIA_API_KEY=sk-3", "SPOOL_POSTGRES_PASSWORD=the-superusers")
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var f file
	if err := json.Unmarshal([]byte(out), &f); err != nil {
		t.Fatal(err)
	}
	if !f.Networks["core"].Internal {
		t.Error("the network core is not internal")
	}
	var socket, keys, way, published, secrets, superuser []string
	certificates := map[string][]string{}
	for _, name := range []string{"executor", "gateway", "janitor", "projector", "skills"} {
		if got := f.Services[name].DependsOn["session"].Condition; got != "service_healthy" {
			t.Errorf("%s may run without a session service, whose gate it reads through: %q", name, got)
		}
	}
	for name, s := range f.Services {
		for _, v := range s.Volumes {
			if strings.Contains(v.Source+v.Target, "docker.sock") {
				socket = append(socket, name)
			}
			if v.Source == "secrets-private" {
				secrets = append(secrets, name)
			}
			if what, ok := strings.CutPrefix(v.Source, "certificates-"); ok && what != "public" {
				certificates[what] = append(certificates[what], name)
			}
		}
		for _, value := range s.Environment {
			if value != nil && strings.HasPrefix(*value, "sk-") && !slices.Contains(keys, name) {
				keys = append(keys, name)
			}
			if value != nil && strings.Contains(*value, "the-superusers") {
				superuser = append(superuser, name)
			}
		}
		for network := range s.Networks {
			if !f.Networks[network].Internal {
				way = append(way, name)
			}
		}
		if len(s.Ports) > 0 {
			published = append(published, name)
		}
		if !slices.Equal(s.CapDrop, []string{"ALL"}) || !slices.Contains(s.SecurityOpt, "no-new-privileges:true") {
			t.Errorf("%s keeps capabilities %v, or may gain some", name, s.CapDrop)
		}
		if pids := s.Deploy.Resources.Limits.Pids; pids < 1 || pids > 1024 {
			t.Errorf("%s may have %d processes, where 0 is any number", name, pids)
		}
		if !s.ReadOnly && name != "postgres" { // the image writes its socket and configuration into several folders
			t.Errorf("%s may write into its image", name)
		}
		if want := map[bool]string{true: "no", false: "unless-stopped"}[name == "provision" || name == "database" || name == "keys" || name == "certificates"]; s.Restart != want {
			t.Errorf("%s is restarted %q, want %q", name, s.Restart, want)
		}
	}
	for what, want := range map[string][]string{"authority": {"certificates"}, "nats": {"certificates", "nats"}, "postgres": {"certificates", "postgres"}, "gateway": {"certificates", "gateway"}} {
		slices.Sort(certificates[what])
		if !slices.Equal(certificates[what], want) {
			t.Errorf("the private key of %s: %v, want %v", what, certificates[what], want)
		}
	}
	slices.Sort(way)
	slices.Sort(secrets)
	slices.Sort(superuser)
	for what, c := range map[string]struct{ got, want []string }{
		"the engine's socket": {socket, []string{"executor"}},
		"keys of models":      {keys, []string{"egress"}},
		"a way out":           {way, []string{"egress", "gateway"}},
		"published ports":     {published, []string{"gateway"}},
		"Postgres' superuser": {superuser, []string{"database", "postgres"}},
		"the key of secrets":  {secrets, []string{"executor", "keys"}},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s: %v, want %v", what, c.got, c.want)
		}
	}
}

// TestComposeFile_PassesEverySetting tests that each setting of docs/operations.md that is in the environment of
// compose reaches the container of its service.
func TestComposeFile_PassesEverySetting(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile(root + "/docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	settings, fixed := map[string][]string{}, map[string]bool{} // by service
	section := ""
	for line := range strings.Lines(string(doc)) {
		if name, ok := strings.CutPrefix(line, "### "); ok {
			section = strings.TrimSpace(name)
		}
		cells := strings.Split(line, "|")
		switch {
		case len(cells) < 5 || !strings.Contains(cells[2], "`"):
		case section == "In compose":
			fixed[strings.TrimSpace(cells[1])+" "+strings.Trim(cells[2], " `")] = true
		default:
			settings[section] = append(settings[section], strings.Trim(cells[2], " `"))
		}
	}
	script := t.TempDir() + "/file"
	if err := os.WriteFile(script, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	files := map[string]string{
		"SPOOL_EGRESS_HOSTS": "/etc/spool/egress-hosts.yaml", "SPOOL_EGRESS_PRICES": "/etc/spool/egress-prices.yaml", "SPOOL_MOCKLLM_SCRIPT": "/etc/spool/script.yaml",
	}
	services := []string{"session", "projector", "janitor", "skills", "gateway", "executor", "egress", "mockllm"}
	var env []string
	for _, s := range services {
		for _, name := range append(settings[s], settings["every service"]...) {
			value := "probe-of-" + name
			if files[name] != "" {
				value = script
			}
			env = append(env, name+"="+value)
		}
	}
	out, err := config(t, "deploy/.env.example", env...)
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var f file
	if err := json.Unmarshal([]byte(out), &f); err != nil {
		t.Fatal(err)
	}
	passed := 0
	for _, s := range services {
		for _, name := range settings[s] {
			if fixed[s+" "+name] {
				continue
			}
			want := "probe-of-" + name
			if files[name] != "" {
				want = files[name]
				mounted := false
				for _, v := range f.Services[s].Volumes {
					mounted = mounted || v.Source == script && v.Target == want
				}
				if !mounted {
					t.Errorf("%s: the file of %s is not mounted: %+v", s, name, f.Services[s].Volumes)
				}
			}
			if got := f.Services[s].Environment[name]; got == nil || *got != want {
				t.Errorf("%s: %s does not reach its container", s, name)
			}
			passed++
		}
	}
	if passed < 60 {
		t.Errorf("only %d settings were read from docs/operations.md", passed)
	}
}

// TestComposeFile_RequiresPasswords tests that nothing starts with an empty password, and that the error states what
// to do.
func TestComposeFile_RequiresPasswords(t *testing.T) {
	t.Parallel()
	example, err := os.ReadFile(root + "/deploy/.env.example")
	if err != nil {
		t.Fatal(err)
	}
	needed := regexp.MustCompile(`(?m)^(SPOOL_\w+)=`).FindAllStringSubmatch(string(example), -1)
	if len(needed) < 16 {
		t.Fatalf("found only %v in .env.example", needed)
	}
	for _, n := range needed {
		without := t.TempDir() + "/env"
		if err := os.WriteFile(without, []byte(strings.Replace(string(example), "\n"+n[1]+"=", "\n"+n[1]+"_NOT=", 1)), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := config(t, without)
		if err == nil || !strings.Contains(out, n[1]) || !strings.Contains(out, "run deploy/env") {
			t.Errorf("without %s: %v, %.200s", n[1], err, out)
		}
	}
}

// TestComposeFile_HasTheServerOfTheModule tests that deployments run the version of nats-server that the tests run.
func TestComposeFile_HasTheServerOfTheModule(t *testing.T) {
	t.Parallel()
	mod, err := os.ReadFile(root + "/pkg/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	compose, err := os.ReadFile(root + "/deploy/compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	version := regexp.MustCompile(`nats-server/v2 v(\S+)`).FindSubmatch(mod)
	image := regexp.MustCompile(`SPOOL_NATS_IMAGE:-nats:([^-\s]+)-`).FindSubmatch(compose)
	if version == nil || image == nil || string(version[1]) != string(image[1]) {
		t.Errorf("pkg/go.mod has nats-server %s, deploy/compose.yaml runs %s", version, image)
	}
	for file, variable := range map[string]string{"services": "GO", "sandbox": "DEBIAN"} {
		docker, err := os.ReadFile(root + "/deploy/images/" + file + ".Dockerfile")
		if err != nil {
			t.Fatal(err)
		}
		argument := regexp.MustCompile(`ARG ` + variable + `_IMAGE=(\S+)`).FindSubmatch(docker)
		pinned := regexp.MustCompile(`SPOOL_` + variable + `_IMAGE:-([^}]+)}`).FindSubmatch(compose)
		if argument == nil || pinned == nil || string(argument[1]) != string(pinned[1]) {
			t.Errorf("%s.Dockerfile is built from %s, in compose.yaml from %s", file, argument, pinned)
		}
	}
}

// TestNATSStart_LimitsTheStoreByTheDisk tests that the store's limit is below the free space of the disk, so that the
// reserve is reached before the disk is full.
func TestNATSStart_LimitsTheStoreByTheDisk(t *testing.T) {
	t.Parallel()
	dir, data := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "nats-server"), []byte("#!/bin/sh\nprintf %s \"$SPOOL_NATS_MAX_STORE\"\n"), 0o700); err != nil { //nolint:gosec // the file is executed
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(data, "stored"), make([]byte, 8<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	started := func(limit string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "/bin/sh", "deploy/nats-start", data)
		cmd.Dir = root
		cmd.Env = []string{"PATH=" + dir + ":" + os.Getenv("PATH"), "SPOOL_NATS_MAX_STORE=" + limit}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if got := started("5GB"); got != "5GB" {
		t.Errorf("5GB became %s", got)
	}
	var disk syscall.Statfs_t
	if err := syscall.Statfs(data, &disk); err != nil {
		t.Fatal(err)
	}
	free := int64(disk.Bavail) * int64(disk.Bsize) //nolint:gosec,unconvert // bytes of a disk
	got, err := strconv.ParseInt(started("auto"), 10, 64)
	if err != nil || got < 640<<20 || free > 2<<30 && (got > free/10*9 || got < free/2) {
		t.Errorf("with %d free bytes the limit of the store is %d, %v", free, got, err)
	}
}

// TestEnv_KeepsWhatItWrote tests that a second run of deploy/env changes nothing.
func TestEnv_KeepsWhatItWrote(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/var/run/docker.sock"); err != nil {
		t.Skipf("no Docker socket, whose group deploy/env needs: %v", err)
	}
	path := t.TempDir() + "/env"
	write := func(args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "deploy/env", append(args, path)...)
		cmd.Dir = root
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	first := write()
	if again := write(); again != first {
		t.Errorf("the second run wrote\n%s\nthe first\n%s", again, first)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("others can read the file: %v, %v", info.Mode(), err)
	}
	seen := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^(SPOOL_\w*(?:PASSWORD|KEY)\w*)=(.*)$`).FindAllStringSubmatch(first, -1) {
		shape := `^[a-z][a-z0-9]{31,}$`
		if m[1] == "SPOOL_HEADS_KEY" { // the seed of an Ed25519 key, which is not part of the NATS configuration
			shape = `^[0-9a-f]{64}$`
		}
		if !regexp.MustCompile(shape).MatchString(m[2]) || seen[m[2]] {
			t.Errorf("%s is weak, or used twice, or a number to NATS: %s", m[1], m[2])
		}
		seen[m[2]] = true
	}
	if len(seen) != 17 {
		t.Errorf("deploy/env created %d passwords:\n%s", len(seen), first)
	}
	// A file of a release before signed commits keeps everything but the NATS passwords, so that the services of that
	// release can no longer write.
	old := regexp.MustCompile(`(?m)^SPOOL_LOG_KEY_.*\n`).ReplaceAllString(first, "")
	if err := os.WriteFile(path, []byte(old), 0o600); err != nil {
		t.Fatal(err)
	}
	upgraded := write()
	for line := range strings.Lines(old) {
		if kept := strings.Contains(upgraded, line); kept == strings.HasPrefix(line, "SPOOL_NATS_PASSWORD_") {
			t.Errorf("an upgrade kept %s: %v", line, kept)
		}
	}
	if strings.Count(upgraded, "\n") != strings.Count(first, "\n") {
		t.Errorf("an upgrade wrote\n%s\nfrom\n%s", upgraded, old)
	}
	first = upgraded
	if mock := write("--mock"); !strings.HasPrefix(mock, first) || !strings.Contains(mock, "SPOOL_ANTHROPIC_BASE_URL=http://mockllm:7799\n") {
		t.Errorf("with --mock deploy/env wrote\n%s", mock)
	}
}
