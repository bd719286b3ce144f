package compat

import (
	"fmt"
	"os"
	"regexp"
	"strings"
)

// shellBlockPattern matches a fenced block of shell commands in Markdown.
var shellBlockPattern = regexp.MustCompile("(?s)```sh\n(.*?)```")

// ShellCommands returns the blocks of shell commands in the section with the given heading of a Markdown file. The
// section ends at the next heading of level 2 or 3.
func ShellCommands(file, heading string) ([]string, error) {
	doc, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	_, section, ok := strings.Cut(string(doc), "\n"+heading+"\n")
	if !ok {
		return nil, fmt.Errorf("%s has no heading %q", file, heading)
	}
	section, _, _ = strings.Cut(section, "\n## ")
	section, _, _ = strings.Cut(section, "\n### ")
	var blocks []string
	for _, m := range shellBlockPattern.FindAllStringSubmatch(section, -1) {
		blocks = append(blocks, m[1])
	}
	return blocks, nil
}
