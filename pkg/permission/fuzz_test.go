package permission_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// scripts generates scripts of which some parts are of the language of shells and others are not.
func scripts() *rapid.Generator[string] {
	pieces := []string{
		"git status", "git", "status", "echo", "evil", "'", "\"", "`", "$(", ")", "(", "${", "}", "{", "$((", "))", "((", "$[", "]", "[[", "]]", "<(", ">(", "<<EOF\n", "\nEOF\n", "<<'EOF'\n", "<<-E\n", "\nE\n", "<<", "<<<", "<", "\\", "\\\n", "\n",
		" ", " ", " ", ";", "&&", "||", "|", "&", "!", "#", "$", "$X", "${X}", "X=", "PATH=.", "2>&1", ">/dev/null", ">", "if ", "; then ", "; fi", "while ", "; do ", "; done", "for x in ", "case ", " in ", ";;", "esac", "f() {", "time ", "coproc ", "eval ", "bash -c ", "exec ", "command ",
		"a", "*", "?", "~", "=", ":", ",", "-", "@(", "\t", "\r", "\x01", "é", "EOF", "E",
	}
	return rapid.Custom(func(t *rapid.T) string {
		return strings.Join(rapid.SliceOfN(rapid.SampledFrom(pieces), 1, 16).Draw(t, "pieces"), "")
	})
}

// place puts a command in a place of a script where a shell runs it.
func place() *rapid.Generator[func(string) string] {
	forms := []string{
		"%", "git status; %", "% && git status", "git status | %", "echo $(%)", "echo \"$(%)\"", "echo a`%`", "cat <(%)", " ( % )", "{ %; }", "! %", "if %; then echo a; fi", "if echo a; then echo b; else %; fi", "while %; do echo a; done",
		"echo ${x:-$(%)}", "echo <<EOF\n$(%)\nEOF\n", "echo <<< $(%)", "f() { %; }; f", "for x in a; do %; done", "for x in $(%); do echo a; done", "case a in a) %;; esac", "X=$(%) echo a", "[[ $(%) ]]", "time %", "coproc %", "% &", "% 2>&1 >/dev/null",
	}
	return rapid.Custom(func(t *rapid.T) func(string) string {
		chosen := rapid.SliceOfN(rapid.SampledFrom(forms), 1, 4).Draw(t, "forms")
		return func(command string) string {
			for _, f := range chosen {
				if !strings.Contains(f, "`") || !strings.Contains(command, "`") { // they do not nest
					command = strings.Replace(f, "%", command, 1)
				}
			}
			return command
		}
	})
}

// TestDecide_SeesEveryCommandOfAScript tests that a command is seen wherever it is in a script: an allow rule for the other
// commands does not match, and a deny rule for it does.
func TestDecide_SeesEveryCommandOfAScript(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		put := place().Draw(t, "place")
		evil := rapid.SampledFrom([]string{"evil", "evil x", "/bin/evil", "'ev'il", "sudo evil", "bash -c 'evil'"}).Draw(t, "command")
		script := put(evil)
		if permits(t, script) {
			t.Fatalf("%q is allowed", script)
		}
		p, err := permission.New(events.Permissions{Preset: "full", Rules: []events.PermissionRule{{Command: []string{"evil"}, Then: "deny"}}}, events.ExecutionPermissions{})
		if err != nil {
			t.Fatal(err)
		}
		if d := p.Decide(bash(script)); d.Action != "deny" {
			t.Fatalf("%q is not denied: %+v", script, d)
		}
	})
}

// permits reports whether a policy that allows git status and echo, and nothing else, allows a script.
func permits(t interface{ Fatal(...any) }, script string) bool {
	p, err := permission.New(events.Permissions{Rules: []events.PermissionRule{{Command: []string{"git status", "echo"}, Then: "allow"}}, Default: "deny"}, events.ExecutionPermissions{})
	if err != nil {
		t.Fatal(err)
	}
	return p.Decide(bash(script)).Action == "allow"
}

// TestDecide_AllowsNoScriptInWhichBashRunsAnotherCommand runs allowed scripts with Bash, in which every other command leaves a
// file.
func TestDecide_AllowsNoScriptInWhichBashRunsAnotherCommand(t *testing.T) {
	t.Parallel()
	shell, err := exec.LookPath("bash")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	other := filepath.Join(dir, "other-command-ran")
	for name, script := range map[string]string{
		"git":  "[ \"$1\" = status ] || echo \"git $*\" >> " + other,
		"evil": "echo evil >> " + other, "a": "echo a >> " + other, "status": "echo status >> " + other, "E": "echo E >> " + other, "EOF": "echo EOF >> " + other,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!"+shell+"\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(shell, filepath.Join(dir, "bash")); err != nil {
		t.Fatal(err)
	}
	allowed := 0
	rapid.Check(t, func(rt *rapid.T) {
		// A prefix makes it likely that the script is allowed.
		script := rapid.SampledFrom([]string{"", "echo ", "git status ", "git status; echo "}).Draw(rt, "prefix") + scripts().Draw(rt, "script")
		if !permits(t, script) || strings.Contains(script, "while ") {
			return
		}
		allowed++
		cmd := exec.CommandContext(t.Context(), shell, "-c", script)
		cmd.Dir, cmd.Env = dir, []string{"PATH=" + dir, "HOME=" + dir}
		out, err := cmd.CombinedOutput()
		if b, readErr := os.ReadFile(other); readErr == nil {
			rt.Fatalf("%q is allowed and ran %q (%v)", script, b, err)
		}
		if strings.Contains(string(out), "command not found") {
			rt.Fatalf("%q is allowed and ran an unknown command: %s", script, out)
		}
		made, err := os.ReadDir(dir)
		if err != nil || len(made) != 7 {
			rt.Fatalf("%q is allowed and made a file: %v (%v)", script, made, err)
		}
	})
	if allowed == 0 {
		t.Error("no script was allowed")
	}
}

// FuzzDecide tests that no call makes a policy panic.
func FuzzDecide(f *testing.F) {
	for _, s := range []string{"git status", "bash -c 'evil' && echo $(x)", "sudo --user root env -S x", "cat <<EOF\n$(x)\nEOF", "((((", "find . -exec", "eval", "trap ''", "timeout -k", "xargs -", "bash -o"} {
		f.Add(s, "src/../a", "Example.com")
	}
	p, err := permission.New(events.Permissions{Preset: "ask", Rules: []events.PermissionRule{
		{Command: []string{"git push", "evil"}, Then: "deny"}, {Path: []string{"{a,b}/**", "/etc/*"}, Then: "deny"}, {Host: []string{"*.example.com"}, Then: "deny"}, {Tool: "[A-Z]*", Command: []string{"git status", "echo"}, Then: "allow"},
	}}, events.ExecutionPermissions{})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, command, path, host string) {
		for _, c := range []permission.Call{
			bash(command), files(command, permission.KindEdit, inside(path), outside(path)), files("Read", permission.KindRead, inside(path)), {Tool: "WebFetch", Kind: permission.KindNetwork, Hosts: []string{host}},
		} {
			if d := p.Decide(c); d.Action == "" || d.Rule == "" {
				t.Errorf("%+v: %+v", c, d)
			}
			if class := p.Class(c); len(class) > 1000 {
				t.Errorf("%+v: the class has %d bytes", c, len(class))
			}
		}
		if _, err := permission.ParseCall(command, events.AgentSpec{}); err == nil && strings.TrimSpace(command) == "" {
			t.Errorf("%q is a call", command)
		}
	})
}
