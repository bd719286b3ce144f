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
var defaultScriptYAML []byte

// DefaultScript returns the built-in script, which the server uses if the user names no file.
func DefaultScript() (*Script, error) { return ParseScript("default.yaml", defaultScriptYAML) }

// LoadScript reads and validates the script in the file at path.
func LoadScript(path string) (*Script, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read script: %w", err)
	}
	return ParseScript(path, data)
}

// ParseScript parses and validates a script in YAML or JSON. The error lists everything that is wrong with the script,
// each with file, line and field.
func ParseScript(file string, data []byte) (*Script, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	l := &scriptLoader{file: file}
	if len(doc.Content) == 0 {
		return nil, fmt.Errorf("%s:1: the script is empty: it needs rules", file)
	}
	s := l.readScript(doc.Content[0])
	if len(l.errs) > 0 {
		return nil, errors.Join(l.errs...)
	}
	return s, nil
}

// scriptLoader decodes a script. It walks the YAML tree itself instead of decoding into structs, so that its errors
// name the field in a sentence that the author of the script understands.
type scriptLoader struct {
	file string
	errs []error
}

// addError records an error at a node of the script. path is the path of the field.
func (l *scriptLoader) addError(n *yaml.Node, path, format string, args ...any) {
	l.errs = append(l.errs, fmt.Errorf("%s:%d: %s: %s", l.file, n.Line, path, fmt.Sprintf(format, args...)))
}

// fieldReader decodes the value of one field of the script and stores it. It records errors with scriptLoader.addError.
type fieldReader func(n *yaml.Node, path string)

// readObject calls the reader of each field of a YAML mapping, and records an error for a field that has none. It
// returns the nodes of the fields that are present.
func (l *scriptLoader) readObject(n *yaml.Node, path string, fields map[string]fieldReader) map[string]*yaml.Node {
	n = resolveAlias(n)
	if n.Kind != yaml.MappingNode {
		l.addError(n, path, "must be a mapping")
		return nil
	}
	seen := map[string]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], resolveAlias(n.Content[i+1])
		at := joinPath(path, key.Value)
		switch set, known := fields[key.Value]; {
		case !known:
			l.addError(key, at, "unknown field; known are %s", fieldNames(fields))
		case seen[key.Value] != nil:
			l.addError(key, at, "given twice")
		default:
			set(value, at)
		}
		seen[key.Value] = key
	}
	return seen
}

// resolveAlias returns the node that an alias stands for, or the node itself.
func resolveAlias(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// joinPath appends a key to the path of a field, for error messages.
func joinPath(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// fieldNames returns the sorted names of the fields that an object may have, for error messages.
func fieldNames(fields map[string]fieldReader) string {
	var all []string
	for name := range fields {
		all = append(all, name)
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// readList calls each for every item of a YAML list.
func (l *scriptLoader) readList(n *yaml.Node, path string, each fieldReader) {
	if n.Kind != yaml.SequenceNode {
		l.addError(n, path, "must be a list")
		return
	}
	for i, item := range n.Content {
		each(resolveAlias(item), fmt.Sprintf("%s[%d]", path, i))
	}
}

// stringInto returns a reader of a text that must not be empty, which it stores in to.
func (l *scriptLoader) stringInto(to *string) fieldReader {
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

// stringsInto returns a reader of a list of texts, which it appends to to.
func (l *scriptLoader) stringsInto(to *[]string) fieldReader {
	return func(n *yaml.Node, path string) {
		l.readList(n, path, func(n *yaml.Node, path string) {
			var s string
			l.stringInto(&s)(n, path)
			*to = append(*to, s)
		})
	}
}

// oneOfInto returns a reader of a text that must be one of the allowed words, which it stores in to.
func (l *scriptLoader) oneOfInto(to *string, allowed ...string) fieldReader {
	return func(n *yaml.Node, path string) {
		if n.Kind != yaml.ScalarNode || !slices.Contains(allowed, n.Value) {
			l.addError(n, path, "must be one of %s", strings.Join(allowed, ", "))
			return
		}
		*to = n.Value
	}
}

// integerInto returns a reader of a number that must be in the range, which it stores in to.
func (l *scriptLoader) integerInto(to *int, from, upTo int) fieldReader {
	return func(n *yaml.Node, path string) {
		i, err := strconv.Atoi(n.Value)
		if n.Kind != yaml.ScalarNode || err != nil || i < from || i > upTo {
			l.addError(n, path, "must be a whole number from %d to %d", from, upTo)
			return
		}
		*to = i
	}
}

// booleanInto returns a reader of true or false, which it stores in to.
func (l *scriptLoader) booleanInto(to *bool) fieldReader {
	return func(n *yaml.Node, path string) {
		if n.Tag != "!!bool" || n.Decode(to) != nil {
			l.addError(n, path, "must be true or false")
		}
	}
}

// durationInto returns a reader of a duration of at least 0, which it stores in to.
func (l *scriptLoader) durationInto(to *time.Duration) fieldReader {
	return func(n *yaml.Node, path string) {
		d, err := time.ParseDuration(n.Value)
		if n.Kind != yaml.ScalarNode || err != nil || d < 0 {
			l.addError(n, path, "must be a duration such as 20ms or 1.5s")
			return
		}
		*to = d
	}
}

// regexInto returns a reader of a regular expression, which it compiles and stores in to.
func (l *scriptLoader) regexInto(to **regexp.Regexp) fieldReader {
	return func(n *yaml.Node, path string) {
		re, err := regexp.Compile(n.Value)
		if n.Kind != yaml.ScalarNode || err != nil {
			l.addError(n, path, "must be a regular expression in Go's syntax: %v", err)
			return
		}
		*to = re
	}
}
