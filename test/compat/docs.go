package compat

import (
	"fmt"
	"os"
	"regexp"
	"strings"
)

var shellBlock = regexp.MustCompile("(?s)```sh\n(.*?)```")

// Commands returns the blocks of shell commands in a section of a Markdown file, up to the next heading of level 2 or
// 3.
func Commands(file, heading string) ([]string, error) {
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
	for _, m := range shellBlock.FindAllStringSubmatch(section, -1) {
		blocks = append(blocks, m[1])
	}
	return blocks, nil
}
