// Package codexcli finds the program of the Codex CLI. The adapter starts the program, and package bareagent does
// without Spool.
package codexcli

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
)

// NativeProgram returns the path of the native program that wrapper, the script that npm installs for Codex, runs; or
// wrapper if the program is not found. Without the wrapper the CLI starts in half the time, and no Node process of 40
// MB stays for each warm agent.
func NativeProgram(wrapper string) string {
	script, err := filepath.EvalSymlinks(wrapper)
	if err != nil || filepath.Base(script) != "codex.js" {
		return wrapper
	}
	scope := filepath.Dir(filepath.Dir(filepath.Dir(script))) // …/@openai/codex/bin/codex.js
	arch := strings.ReplaceAll(runtime.GOARCH, "amd64", "x64")
	for _, modules := range []string{scope, filepath.Join(scope, "codex", "node_modules", "@openai")} {
		found, err := fs.Glob(os.DirFS(modules), path.Join("codex-"+runtime.GOOS+"-"+arch, "vendor", "*", "bin", "codex"))
		if err == nil && len(found) == 1 {
			return filepath.Join(modules, found[0])
		}
	}
	return wrapper
}
