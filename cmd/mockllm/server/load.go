package server

import (
	_ "embed"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

//go:embed default.yaml
var defaultScript []byte

// Default returns the script that is used when none is given.
func Default() (*Script, error) { return Load("default.yaml", defaultScript) }

// LoadFile reads and checks the script at path.
func LoadFile(path string) (*Script, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read script: %w", err)
	}
	return Load(path, data)
}

// Load checks a script in YAML or JSON. The error names file, line and field
// of everything that is wrong with it.
func Load(file string, data []byte) (*Script, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	l := &loader{file: file}
	if len(doc.Content) == 0 {
		return nil, fmt.Errorf("%s:1: the script is empty: it needs rules", file)
	}
	s := l.script(doc.Content[0])
	if len(l.errs) > 0 {
		return nil, errors.Join(l.errs...)
	}
	return s, nil
}

// loader reads a script. It walks the YAML tree itself, so that its errors name the field in a sentence that the author
// of the script understands.
type loader struct {
	file string
	errs []error
}

// addError records an error at a node. path is the path of the field in the script.
func (l *loader) addError(n *yaml.Node, path, format string, args ...any) {
	l.errs = append(l.errs, fmt.Errorf("%s:%d: %s: %s", l.file, n.Line, path, fmt.Sprintf(format, args...)))
}

// field is a function that reads and stores the value of a field of the script. It records errors with loader.fail.
type field func(n *yaml.Node, path string)

// readObject passes each field to its function and refuses unknown fields. It returns the fields that are present.
func (l *loader) readObject(n *yaml.Node, path string, fields map[string]field) map[string]*yaml.Node {
	n = resolve(n)
	if n.Kind != yaml.MappingNode {
		l.addError(n, path, "must be a mapping")
		return nil
	}
	seen := map[string]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], resolve(n.Content[i+1])
		at := join(path, key.Value)
		switch set, known := fields[key.Value]; {
		case !known:
			l.addError(key, at, "unknown field; known are %s", names(fields))
		case seen[key.Value] != nil:
			l.addError(key, at, "given twice")
		default:
			set(value, at)
		}
		seen[key.Value] = key
	}
	return seen
}

// resolve returns the node that an alias stands for, or the node itself.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// join returns the path of a field, for errors.
func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// names returns the sorted names of fields, for errors.
func names(fields map[string]field) string {
	var all []string
	for name := range fields {
		all = append(all, name)
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// list calls each for every item of a list.
func (l *loader) list(n *yaml.Node, path string, each field) {
	if n.Kind != yaml.SequenceNode {
		l.addError(n, path, "must be a list")
		return
	}
	for i, item := range n.Content {
		each(resolve(item), fmt.Sprintf("%s[%d]", path, i))
	}
}

// string returns the field that stores a text, which must not be empty, in to.
func (l *loader) string(to *string) field {
	return func(n *yaml.Node, path string) {
		switch {
		case n.Kind != yaml.ScalarNode || n.Tag == "!!null":
			l.addError(n, path, "must be a text")
		case n.Value == "":
			l.addError(n, path, "must not be empty")
		default:
			*to = n.Value
		}
	}
}

// strings returns the field that appends a list of texts to to.
func (l *loader) strings(to *[]string) field {
	return func(n *yaml.Node, path string) {
		l.list(n, path, func(n *yaml.Node, path string) {
			var s string
			l.string(&s)(n, path)
			*to = append(*to, s)
		})
	}
}

// oneOf returns the field that stores one of the allowed words in to.
func (l *loader) oneOf(to *string, allowed ...string) field {
	return func(n *yaml.Node, path string) {
		if n.Kind != yaml.ScalarNode || !slices.Contains(allowed, n.Value) {
			l.addError(n, path, "must be one of %s", strings.Join(allowed, ", "))
			return
		}
		*to = n.Value
	}
}

// integer returns the field that stores a number in to, which must be in the range.
func (l *loader) integer(to *int, from, upTo int) field {
	return func(n *yaml.Node, path string) {
		i, err := strconv.Atoi(n.Value)
		if n.Kind != yaml.ScalarNode || err != nil || i < from || i > upTo {
			l.addError(n, path, "must be a whole number from %d to %d", from, upTo)
			return
		}
		*to = i
	}
}

// boolean returns the field that stores true or false in to.
func (l *loader) boolean(to *bool) field {
	return func(n *yaml.Node, path string) {
		if n.Tag != "!!bool" || n.Decode(to) != nil {
			l.addError(n, path, "must be true or false")
		}
	}
}

// duration returns the field that stores a duration of at least 0 in to.
func (l *loader) duration(to *time.Duration) field {
	return func(n *yaml.Node, path string) {
		d, err := time.ParseDuration(n.Value)
		if n.Kind != yaml.ScalarNode || err != nil || d < 0 {
			l.addError(n, path, "must be a duration such as 20ms or 1.5s")
			return
		}
		*to = d
	}
}

// regex returns the field that compiles a regular expression into to.
func (l *loader) regex(to **regexp.Regexp) field {
	return func(n *yaml.Node, path string) {
		re, err := regexp.Compile(n.Value)
		if n.Kind != yaml.ScalarNode || err != nil {
			l.addError(n, path, "must be a regular expression in Go's syntax: %v", err)
			return
		}
		*to = re
	}
}
