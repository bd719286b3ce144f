package definition

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/events"
)

// Limits of a file. The target of an alias counts each time the alias is used.
const (
	MaxFileSize     = 4 << 20 // bytes
	maxNestingDepth = 32      // levels of nested lists and mappings
	maxNodes        = 100_000 // number of values
	maxReadBytes    = 2 * MaxFileSize
	maxErrors       = 1000 // number of reported errors
)

// file holds the fields of one document of a definition file.
type file[S any] struct {
	Kind  Kind                  `json:"kind"`            // agent, instance or environment
	Slug  string                `json:"slug"`            // name: 1 to 64 characters, groups of a-z and 0-9 joined by single dots or hyphens
	Scope events.ReferenceScope `json:"scope,omitempty"` // organization (the default), platform or identity_account
	Org   string                `json:"org,omitempty"`   // an organization of the tenant; for scope identity_account the account
	Tags  []string              `json:"tags,omitempty"`  // tags of the version, in addition to latest
	Spec  S                     `json:"spec"`            // the definition; its fields depend on kind
}

// Parse parses the definitions of a YAML or JSON file. name is the file's name for errors. The error is Errors with
// all problems, sorted by line. Parse does not read the variables and files that valueFrom names, see
// EnvironmentSpec.ReadValues.
func Parse(name string, data []byte) ([]Document, error) {
	r := &nodeReader{file: name, nodes: maxNodes, bytes: maxReadBytes}
	var out []Document
	for _, n := range r.parseYAML(data) {
		if len(r.errs) > maxErrors {
			break
		}
		if d, ok := r.parseDocument(n); ok {
			out = append(out, d)
		}
	}
	r.checkDuplicateEntries(out)
	if len(r.errs) > 0 {
		r.errs.sort()
		if extra := len(r.errs) - maxErrors; extra > 0 {
			r.errs = append(r.errs[:maxErrors], &Error{File: r.file, Detail: fmt.Sprintf("at least %d more errors", extra)})
		}
		return nil, r.errs
	}
	return out, nil
}

// parseYAML returns the documents of a YAML file, up to the first that is not valid YAML.
func (r *nodeReader) parseYAML(data []byte) []*yaml.Node {
	refuse := func(p FilePosition, detail string) []*yaml.Node {
		r.errs = append(r.errs, &Error{File: r.file, FilePosition: p, Detail: detail})
		return nil
	}
	if len(data) > MaxFileSize {
		return refuse(FilePosition{}, fmt.Sprintf("is larger than %d MiB", MaxFileSize>>20))
	}
	if at := invalidUTF8Offset(data); at >= 0 {
		return refuse(positionOfOffset(data, at), "is not valid UTF-8")
	}
	var list []*yaml.Node
	var err error
	if isJSON(r.file, data) {
		list, err = readJSON(data)
	} else if at := bytes.IndexFunc(data, isForbiddenControl); at >= 0 {
		return refuse(positionOfOffset(data, at), "control characters are not allowed; in double quotes write \\x and two digits")
	} else {
		list, err = readYAML(data)
	}
	if err != nil {
		refuse(errorPosition(err), strings.TrimPrefix(yamlErrorLine.ReplaceAllString(err.Error(), ""), "yaml: "))
	} else if len(list) == 0 {
		return refuse(FilePosition{1, 1}, "is empty: a definition has kind, slug and spec")
	}
	for i, n := range list {
		if deep := findTooDeep(n, maxNestingDepth); deep != nil {
			refuse(positionOfNode(deep), errTooDeep.Error())
			return list[:i]
		}
	}
	return list
}

func readYAML(data []byte) ([]*yaml.Node, error) {
	var list []*yaml.Node
	for dec := yaml.NewDecoder(bytes.NewReader(data)); ; {
		var n yaml.Node
		err := dec.Decode(&n)
		switch {
		case errors.Is(err, io.EOF):
			return list, nil
		case err != nil:
			return list, err
		case n.Kind == yaml.DocumentNode && len(n.Content) == 1 && n.Content[0].ShortTag() != tagNull:
			list = append(list, n.Content[0])
		}
	}
}

var errTooDeep = fmt.Errorf("lists and mappings are nested more than %d deep", maxNestingDepth)

// yamlErrorLine matches a line number in errors of the YAML library.
var yamlErrorLine = regexp.MustCompile(`line (\d+): `)

func errorPosition(err error) FilePosition {
	var j *jsonError
	if errors.As(err, &j) {
		return j.FilePosition
	}
	if m := yamlErrorLine.FindStringSubmatch(err.Error()); m != nil {
		line, _ := strconv.Atoi(m[1]) // digits; after an overflow there is no line
		return FilePosition{Line: line}
	}
	return FilePosition{}
}

// findTooDeep returns a descendant of n that is nested deeper than limit, or nil. It does not follow aliases.
func findTooDeep(n *yaml.Node, limit int) *yaml.Node {
	if limit < 0 {
		return n
	}
	for _, c := range n.Content {
		if deep := findTooDeep(c, limit-1); deep != nil {
			return deep
		}
	}
	return nil
}

// parseDocument reads a document with the fields of its kind.
func (r *nodeReader) parseDocument(n *yaml.Node) (Document, bool) {
	r.positions = map[string]FilePosition{"": positionOfNode(n)}
	d := Document{file: r.file, positions: r.positions}
	before := len(r.errs)
	kind := ""
	for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == "kind" {
			kind = n.Content[i+1].Value
		}
	}
	switch d.Kind = Kind(kind); d.Kind {
	case KindAgent:
		var f file[events.AgentSpec]
		readDocument(r, n, &f, &d)
		f.Spec.Architecture = resolveArchitectureAlias(f.Spec.Architecture)
		d.Agent = &f.Spec
		r.addSpecErrors(d, before, CheckAgent(f.Spec))
	case KindInstance:
		var f file[events.InstanceSpec]
		readDocument(r, n, &f, &d)
		d.Instance = &f.Spec
		r.addSpecErrors(d, before, CheckInstance(f.Spec))
	case KindEnvironment:
		var f file[EnvironmentSpec]
		readDocument(r, n, &f, &d)
		d.Environment = &f.Spec
		r.addSpecErrors(d, before, f.Spec.CheckFile())
	default:
		var f file[any]
		readDocument(r, n, &f, &d)
		if n.Kind == yaml.MappingNode && !r.hasError(before, "kind") {
			r.addError(nearestPosition(r.positions, "kind"), "kind", "%.64q is not a kind; must be %s, %s or %s", kind, KindAgent, KindInstance, KindEnvironment)
		}
		r.addSpecErrors(d, before, nil)
	}
	return d, len(r.errs) == before
}

func resolveArchitectureAlias(name string) string {
	if a, ok := architecture.Canonical(name); ok {
		return a
	}
	return name
}

// readDocument reads the fields of a document into f and d.
func readDocument[S any](r *nodeReader, n *yaml.Node, f *file[S], d *Document) {
	r.readNode(n, reflect.ValueOf(f).Elem(), "")
	d.Ref, d.Tags = events.Reference{Scope: f.Scope, Org: f.Org, Slug: f.Slug}.WithoutVersion(), f.Tags
}

// addSpecErrors adds those errors in spec that concern fields without a parse error. before is the number of errors
// before the document was read.
func (r *nodeReader) addSpecErrors(d Document, before int, spec []FieldError) {
	if r.exhausted {
		return
	}
	read := len(r.errs)
	add := func(field, detail string) {
		for _, e := range r.errs[before:read] {
			if e.Field == "" || fieldContains(e.Field, field) || fieldContains(field, e.Field) {
				return
			}
		}
		r.errs = append(r.errs, d.ErrorAt(field, detail))
	}
	for _, e := range CheckEntryNames(d.Ref, d.Tags) {
		add(e.Field, e.Detail)
	}
	for _, e := range spec {
		add("spec."+e.Field, e.Detail)
	}
}

// hasError reports whether an error about a field was added after the first before errors.
func (r *nodeReader) hasError(before int, field string) bool {
	for _, e := range r.errs[before:] {
		if e.Field == field {
			return true
		}
	}
	return false
}

// fieldContains reports whether the field inner is the field outer or is inside of it.
func fieldContains(outer, inner string) bool {
	rest, ok := strings.CutPrefix(inner, outer)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

// checkDuplicateEntries adds an error for each catalogue entry that a file defines more than once.
func (r *nodeReader) checkDuplicateEntries(list []Document) {
	seen := map[string]FilePosition{}
	for _, d := range list {
		key := string(d.Kind) + " " + d.Ref.String()
		if first, ok := seen[key]; ok {
			r.errs = append(r.errs, d.ErrorAt("slug", fmt.Sprintf("%s is already defined in line %d", key, first.Line)))
			continue
		}
		seen[key] = d.positions[""]
	}
}

// invalidUTF8Offset returns the offset of the first byte that is not valid UTF-8, or -1.
func invalidUTF8Offset(data []byte) int {
	for at := 0; at < len(data); {
		c, size := utf8.DecodeRune(data[at:])
		if c == utf8.RuneError && size == 1 {
			return at
		}
		at += size
	}
	return -1
}

// isForbiddenControl reports whether c is a control character that YAML forbids.
func isForbiddenControl(c rune) bool {
	return c < ' ' && c != '\t' && c != '\n' && c != '\r' || c >= 0x7f && c < 0xa0 && c != 0x85
}

// positionOfOffset returns the line and the column, in characters, of a byte offset.
func positionOfOffset(data []byte, offset int) FilePosition {
	before := data[:offset]
	start := bytes.LastIndexByte(before, '\n') + 1
	return FilePosition{bytes.Count(before, []byte{'\n'}) + 1, utf8.RuneCount(before[start:]) + 1}
}

func positionOfNode(n *yaml.Node) FilePosition { return FilePosition{n.Line, n.Column} }
