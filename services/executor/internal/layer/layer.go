// Package layer is shared by providers that install packages once for many sandboxes. It has the settings, the
// installers' command lines, the paths in a layer, the error messages of installers, and SingleFlight, with which one of
// several callers creates a layer.
package layer

import (
	"errors"
	"fmt"
	"net/url"
	"path"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/dependency"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// Config configures how dependency layers are installed and how long they are kept. Within, MaxBytes and Keep are
// required.
type Config struct {
	NPMRegistry string        // "" for the installer's default
	PIPIndexURL string        // "" for the installer's default
	Within      time.Duration // time limit of an installation
	MaxBytes    int64         // size limit of a layer
	Keep        time.Duration // time for which an unused layer is kept
}

// Check returns an error if one of the limits in the config is not positive.
func (c Config) Check() error {
	if c.Within <= 0 || c.MaxBytes <= 0 || c.Keep <= 0 {
		return errors.New("the limits Within, MaxBytes and Keep must be positive")
	}
	return nil
}

// CheckURL returns an error if the URL of a package registry is not valid or contains a credential. The scripts of
// packages can read the URL.
func CheckURL(s string) error {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return errors.New("it is not a URL") // the parser's error would repeat the address
	case u.Scheme != "https" && u.Scheme != "http" || u.Hostname() == "":
		return errors.New("it is not http:// or https:// with a host")
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return errors.New("it has a user, a query or a fragment: scripts of packages would see a credential; have the egress proxy add it, by a host in SPOOL_EGRESS_HOSTS")
	case strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }):
		return errors.New("it has a character that is not valid in a URL")
	}
	return nil
}

// isProxyRoute reports whether the URL of a package registry is a route of the egress proxy.
func isProxyRoute(s string) bool { return strings.HasPrefix(s, runner.EgressURL+"/") }

// Installer is a command that installs packages into a dependency layer.
type Installer struct {
	Name string // name of the program, for messages
	Args []string
}

// Installers returns the commands that install a set of packages into the folder of a dependency layer. Names and
// versions of packages are separate arguments, after the end of the options.
func (c Config) Installers(set dependency.PackageSet, dir string) []Installer {
	var out []Installer
	if len(set.NPM) > 0 {
		args := []string{"npm", "install", "--prefix", dir, "--no-save", "--no-package-lock", "--no-fund", "--no-audit", "--no-update-notifier", "--no-progress", "--loglevel=error", "--logs-max=0",
			"--fetch-retries=3", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=5000"}
		if c.NPMRegistry != "" {
			args = append(args, "--registry="+c.NPMRegistry)
		}
		if isProxyRoute(c.NPMRegistry) { // the archives that it names are behind the same route
			args = append(args, "--replace-registry-host=always")
		}
		out = append(out, Installer{"npm", append(append(args, "--"), set.NPM...)})
	}
	if len(set.PIP) > 0 {
		args := []string{"python3", "-m", "pip", "install", "--target", path.Join(dir, "python"), "--no-input", "--disable-pip-version-check", "--no-cache-dir", "--no-color", "--progress-bar=off"}
		if c.PIPIndexURL != "" {
			args = append(args, "--index-url="+c.PIPIndexURL)
			if u, err := url.Parse(c.PIPIndexURL); err == nil && u.Scheme == "http" { // pip requires a confirmation by the operator, which the setting is
				args = append(args, "--trusted-host="+u.Host)
			}
		}
		out = append(out, Installer{"pip", append(append(args, "--"), set.PIP...)})
	}
	return out
}

// ProgramFolders returns the folders with the programs of a dependency layer, for the variable PATH.
func ProgramFolders(dir string) []string {
	return []string{path.Join(dir, "node_modules", ".bin"), path.Join(dir, "python", "bin")}
}

// PackageVariables returns the variables by which Node and Python find the packages of a dependency layer.
func PackageVariables(dir string) []string {
	return []string{"NODE_PATH=" + path.Join(dir, "node_modules"), "PYTHONPATH=" + path.Join(dir, "python")}
}

// InstallError returns the error of an execution whose agent's dependencies could not be installed.
func InstallError(format string, args ...any) error {
	return &sandbox.Error{Code: sandbox.CodeDependenciesFailed, Message: "the agent's dependencies could not be installed: " + fmt.Sprintf(format, args...)}
}

// TooLargeError returns the error of an installation that exceeded the size limit of a layer.
func (c Config) TooLargeError() error {
	return InstallError("they take more than %d bytes: raise SPOOL_DEPENDENCIES_SIZE, or depend on less", c.MaxBytes)
}

// TimeoutError returns the error of an installation that exceeded its time limit. said is the output of the installer.
func (c Config) TimeoutError(said string) error {
	return InstallError("it took longer than %s (SPOOL_DEPENDENCIES_TIMEOUT); the installer last said: %s", c.Within, LastLines(said))
}

// Limits of the part of an installer's output that is reported.
const (
	maxReportedLines = 20
	maxReportedBytes = 2000
	maxTailBytes     = 16 << 10
)

// npmNoLogsMessage is npm's message that it has written no log files. LastLines removes it from npm's output.
const npmNoLogsMessage = "npm error Log files were not written due to the config logs-max=0"

var (
	terminalEscapePattern = regexp.MustCompile("\x1b\\[[0-9;?]*[A-Za-z]")
	urlUserInfoPattern    = regexp.MustCompile(`://[^/\s@]+@`)
	credentialPattern     = regexp.MustCompile(`(?i)((?:_authToken|_auth|_password|token|password|authorization)["']?\s*[=:]\s*["']?)(?:(?:basic|bearer)\s+)?[^\s"']+`)
)

// LastLines returns the last lines of an installer's output for an error message. It limits their length, and removes
// text that looks like a credential and terminal escape codes.
func LastLines(text string) string {
	text = terminalEscapePattern.ReplaceAllString(strings.ToValidUTF8(text, "\uFFFD"), "")
	text = urlUserInfoPattern.ReplaceAllString(text, "://***@")
	text = credentialPattern.ReplaceAllString(text, "${1}***")
	text = strings.ReplaceAll(text, npmNoLogsMessage, "")
	var lines []string
	for line := range strings.Lines(text) {
		line = strings.TrimRight(strings.Map(func(r rune) rune {
			if r < ' ' && r != '\t' || r == 0x7f {
				return -1
			}
			return r
		}, line), " ")
		if line != "" {
			lines = append(lines, line)
		}
	}
	out := strings.Join(lines[max(0, len(lines)-maxReportedLines):], "\n")
	if cut := len(out) - maxReportedBytes; cut > 0 {
		for !utf8.RuneStart(out[cut]) {
			cut++
		}
		out = "…" + out[cut:]
	}
	if out == "" {
		return "nothing"
	}
	return out
}
