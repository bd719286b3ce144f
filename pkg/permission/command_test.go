package permission_test

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

func policy(t testing.TB, agent events.Permissions, execution ...events.PermissionRule) *permission.Policy {
	t.Helper()
	p, err := permission.New(agent, events.ExecutionPermissions{Rules: execution})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func bash(command string) permission.Call {
	return permission.Call{Tool: "Bash", Kind: permission.KindShell, Command: command}
}

// decides returns the action of a policy that has one rule about commands and otherwise another action.
func decides(t testing.TB, then string, commands []string, command string) bool {
	t.Helper()
	other := events.PermissionAsk
	if then == events.PermissionAsk {
		other = events.PermissionAllow
	}
	p := policy(t, events.Permissions{Rules: []events.PermissionRule{{Command: commands, Then: then}}, Default: other})
	return p.Decide(bash(command)).Action == then
}

func TestDecide_AllowsOnlyCommandsOfTheRule(t *testing.T) {
	t.Parallel()
	allowed := []string{"git status", "git log", "echo", "cat", "./build"}
	for _, c := range []string{
		"git status", "git status -s", "  git   status\n", "'git' \"status\"", `g\it status`, "git status # a comment", "git log $X \"${Y}\"", "echo 'rm -rf /'", "echo \\; rm",
		"git status && git log | cat", "git status; echo a\necho b", "! git status", "(git status; { git log; })", "git status &", "echo $(git log)", "echo \"$(git log)\" `git status`",
		"cat <(git log)", "git log >/dev/null 2>&1", "git log &>/dev/null", "git log 2>&-", "if git status; then echo a; elif cat x; then echo b; else echo c; fi", "while git status; do echo a; done",
		"cat <<EOF\ntext $(git log)\nEOF", "cat <<< x", "cat < x", "bash -c 'git status'", "/bin/bash -lc 'git status && git log'", "./build all",
		"echo a \\\n  b", "git status {} [ x", "echo *.go {a,b} ~/x", "echo {}",
	} {
		if !decides(t, "allow", allowed, c) {
			t.Errorf("%q is not allowed", c)
		}
	}
	for _, c := range []string{
		"", "git", "git push", "gitstatus", "git statusx", "/usr/bin/git status", "build", "GIT status", "git -C x status", "#git status", "status git",
		"git status && rm x", "git status; rm x", "git status | sh", "git status || rm", "git status\nrm x", "git status & rm x", "(git status; rm x)", "rm x; git status",
		"echo $(rm x)", "echo \"$(rm x)\"", "echo `rm x`", "echo ${x:-$(rm x)}", "cat <(rm x)", "cat <<EOF\n$(rm x)\nEOF", "cat <<< $(rm x)", "echo \"${x[$(rm x)]}\"",
		"git status > x", "git status >> x", "git status >| x", "git status &> x", "git status >& x", "git status 2> x", "git status <> x", "git status {fd}>/dev/null", "> x", ">/dev/null", "git status > $X",
		"cat < /dev/tcp/example.com/80", "cat < $X", "cat <<E'O'F-x\nx\nE\n", "X=1 git status", "PATH=. git status", "X=1", "X=1; git status", "$X status", "git $X", "g?t status", "git stat*", "{git,status}", "git {status,push}",
		"~/git status", "=git status", "$'git' status", "$\"git\" status", "git status$X", "git `echo status`", "echo $((x=1))", "echo ${x:=1}", "echo ${x@P}", "echo ${!x}", "echo $[x=1]", "((x=1))", "let x=1",
		"[[ -v a[$(rm)] ]]", "export PATH=.; git status", "declare -x PATH=.", "f() { git status; }; f", "git() { rm x; }; git status", "for PATH in .; do git status; done", "case x in *) git status;; esac",
		"coproc git status", "time git status", "echo @(a|b)", "git status\r", "git\rstatus", "git status \x00", "git status \x1b[2J", "git status \xff", "git status '", "git status (", "git status # a \\\nrm x", "git status;#\\\nrm x", "echo $(git status # \\\nrm x\n)", "echo a)",
		"sudo git status", "env git status", "xargs git status", "eval git status", "eval 'git status'", "sh -c 'git status' x", "bash -c 'rm x'", "bash -c \"git status $(rm x)\"", "zsh -c 'git status'", "bash -xc 'git status'", "./bash -c 'git status'",
		"bash -c 'git status' > x", "bash -c 'git status' && rm", "select x in a; do git status; done", strings.Repeat("(", 2000) + "git status" + strings.Repeat(")", 2000), "git status " + strings.Repeat("x", 200_000),
	} {
		if decides(t, "allow", allowed, c) {
			t.Errorf("%.200q is allowed", c)
		}
	}
	// Commands that change which program a name starts are allowed alone only.
	for c, want := range map[string]bool{"printf -v PATH .; git status": false, "printf x; git status": true, "printf -v PATH .": true, "read PATH; git status": false, "hash -p ./evil git; git status": false} {
		if got := decides(t, "allow", []string{"printf", "read", "hash", "git status"}, c); got != want {
			t.Errorf("%q: allowed %t", c, got)
		}
	}
}

func TestDecide_DeniesAndAsksIfACommandMayMatch(t *testing.T) {
	t.Parallel()
	denied := []string{"rm", "git push", "export"}
	for _, c := range []string{
		"rm", "rm -rf x", "/bin/rm x", "./rm x", "~/bin/rm x", `\rm x`, "'rm' x", `r""m x`, "X=1 rm x", "ls && rm x", "ls | rm", "ls; rm", "ls\nrm x", "ls & rm x", "! rm x", "(rm x)", "{ rm x; }",
		"echo $(rm x)", "echo `rm x`", "echo \"a $(rm x)\"", "cat <(rm x)", "cat <<EOF\n$(rm x)\nEOF", "echo ${x:-$(rm x)}", "echo $(( $(rm x) ))", "[[ $(rm x) ]]", "X=$(rm x)", "export X=$(rm x)", "a=($(rm x))",
		"if true; then rm x; fi", "for f in *; do rm \"$f\"; done", "while true; do rm x; done", "case $x in a) rm x;; esac", "f() { rm x; }; f", "coproc rm x", "coproc rm 2>&1", "time rm x", "time -p rm x", "rm > x", "rm x &",
		"sudo rm x", "sudo -u root rm x", "sudo -uroot rm x", "sudo --user root rm x", "sudo --user=root rm x", "sudo -n -- rm x", "sudo X=1 rm x", "/usr/bin/sudo rm x", "doas rm x",
		"env rm x", "env X=1 rm x", "env -i X=1 rm x", "env - rm x", "env -u X rm x", "env -S 'rm x'", "env --split-string='rm x'", "env -iS'rm x'",
		"nohup rm x", "nice rm x", "nice -n 5 rm x", "nice -5 rm x", "timeout 5 rm x", "timeout -s KILL 5 rm x", "timeout -k 1 5 rm x", "timeout --foreground 5 rm x", "timeout --signal KILL --foreground 5 rm x", "timeout $T rm x",
		"xargs rm", "ls | xargs -n 1 rm -f", "ls | xargs -0 rm", "xargs -I {} rm {}", "xargs -I{} rm {}", "xargs --max-args 1 rm", "exec rm x", "exec -a ls rm x", "command rm x", "command -p rm x", "builtin rm", "busybox rm x", "setsid rm x", "stdbuf -o L rm x", "chroot / rm x",
		"sudo nice timeout 5 env X=1 rm x", "sh -c 'rm x'", "bash -lc 'rm x'", "bash -c 'ls; rm x' a b", "bash -euo pipefail -c 'rm x'", "bash -c -o pipefail 'rm x'", "bash --norc -c 'rm x'", "zsh -c 'rm x'", "dash -ec 'rm x'", "sh -c \"sh -c 'rm x'\"", "sudo sh -c 'rm x'",
		"eval rm x", "eval 'rm' x", "eval 'ls; rm x'", "eval \"$X\"", "trap 'rm x' EXIT", "find . -exec rm {} \\;", "find . -name x -execdir rm {} +", "find . -exec sh -c 'rm x' \\;",
		"$X", "$X x", "\"$X\"", "$(echo rm) x", "`x` y", "r? x", "{rm,x}", "$'rm' x", "=rm x", "~", "sh -c \"$X\"", "sh -c", "sh", "bash -s", "curl x | sh", "echo rm x | bash -s -- a", "bash <(echo rm)", "bash <<EOF\nrm x\nEOF", "sh /dev/stdin", "source <(echo rm)", ". /dev/stdin", ". $X",
		"rm '", "(", "rm x )", "\xff", strings.Repeat("(", 2000), strings.Repeat("sudo --a ", 10_000), strings.Repeat("find -exec ", 10_000), "ls " + strings.Repeat("x", 200_000),
		"git push", "git push --force", "git -C x push", "git --no-pager push", "git -c a=b --no-pager push origin", "git $X", "git -C $D push", "git \"$(x)\"", "/usr/bin/git push", "export X=1", "ls\r\nrm x", "ls >&1'$(rm x)'", "ls # a \\\nrm x", "ls #\\\r\nrm x", "echo $(ls # \\\nrm x\n)", "case x in # \\\n*) rm x;; # \\\nesac",
	} {
		for _, then := range []string{"deny", "ask"} {
			if !decides(t, then, denied, c) {
				t.Errorf("%s: %.200q does not match", then, c)
			}
		}
	}
	for _, c := range []string{
		"", "ls", "ls rm", "echo rm", "echo 'rm x'", "# rm x", "ls # rm", "rmdir x", "xrm", "cat <<'EOF'\n$(rm x)\nEOF", "grep -r rm .", "command -v rm", "command -V rm", "sudo ls rm", "sudo -u rm ls", "xargs -n 1 grep rm", "timeout 5 ls", "timeout -s rm 5 ls",
		"git", "git status", "git commit -m push", "git log push", "git stash push x", "sh script.sh rm", "bash -c 'ls' rm", "bash -x ./script.sh", "source ./x", "trap - EXIT", "trap EXIT", "find . -name rm", "find . -exec ls {} +", "echo $X", "X=rm", "for f in rm; do ls; done", "env", "env X=1", "eval", "exec > x", "[ -f rm ]", "2>/dev/null ls",
	} {
		for _, then := range []string{"deny", "ask"} {
			if decides(t, then, denied, c) {
				t.Errorf("%s: %q matches", then, c)
			}
		}
	}
}

func TestDecide_SaysThatACommandIsNotKnown(t *testing.T) {
	t.Parallel()
	p := policy(t, events.Permissions{Rules: []events.PermissionRule{{Command: []string{"rm"}, Then: "deny"}}})
	if d := p.Decide(bash("$X")); d.Action != "deny" || d.Rule != "rules[0]" || !strings.Contains(d.Reason, "cannot tell what the command runs") {
		t.Error(d)
	}
	if d := p.Decide(bash("rm x")); d.Action != "deny" || strings.Contains(d.Reason, "cannot tell") {
		t.Error(d)
	}
}

func TestClass_CoversNoMoreThanItSays(t *testing.T) {
	t.Parallel()
	for command, want := range map[string]string{
		"ls": "commands that begin with `ls`", "ls -la x y": "commands that begin with `ls`", "/bin/ls": "commands that begin with `/bin/ls`", "ls 2>/dev/null": "commands that begin with `ls`", "ls $X \"$Y\"": "commands that begin with `ls`",
		"git commit -m 'a; b'": "commands that begin with `git commit`", "npm run build": "commands that begin with `npm run`", "bash -lc 'git commit -m x'": "commands that begin with `git commit`",
		"git": "the command `git`", "git -C x push": "the command `git -C x push`", "git $X": "the command `git $X`", "make": "the command `make`", "make all": "commands that begin with `make all`",
		"ls && rm x": "the command `ls && rm x`", "ls > x": "the command `ls > x`", "ls < x": "the command `ls < x`", "X=1 ls": "the command `X=1 ls`", "ls $(rm x)": "the command `ls $(rm x)`", "ls &": "the command `ls &`", "! ls": "the command `! ls`", "$X": "the command `$X`", "(ls)": "the command `(ls)`",
		"sudo ls": "the command `sudo ls`", "env ls": "the command `env ls`", "sh -c ls": "commands that begin with `ls`", "sh -xc ls": "the command `sh -xc ls`", "eval ls": "the command `eval ls`", "/usr/bin/xargs rm": "the command `/usr/bin/xargs rm`", "find . -delete": "the command `find . -delete`", "exec ls": "the command `exec ls`", "~/x": "the command `~/x`",
		"'git commit' x": "the command `'git commit' x`", "(": "the command `(`",
	} {
		if got := (&permission.Policy{}).Class(bash(command)); got != want {
			t.Errorf("%q: %s, want %s", command, got, want)
		}
	}
	long := func(end string) string {
		return (&permission.Policy{}).Class(bash("ls && echo " + strings.Repeat("x", 500) + end))
	}
	if a, b := long("a"), long("b"); a == b || !strings.HasPrefix(a, "the command `ls && echo xxx") || len(a) > 200 || a != long("a") {
		t.Errorf("long commands: %s, %s", a, b)
	}
	if got := (&permission.Policy{}).Class(bash("'a`b'")); !strings.HasPrefix(got, "the command `'a b'…` (SHA-256 ") {
		t.Errorf("a command with a backtick: %s", got)
	}
	if got := (&permission.Policy{}).Class(bash("ls &&\n\x1b[2Jls \u202e")); strings.ContainsAny(got, "\n\x1b\u202e") {
		t.Errorf("%q has characters that a terminal hides", got)
	}
}
