package definition

import (
	"fmt"
	"io"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/spoolhq/spool/pkg/events"
)

// FromStored converts an environment of the server into the spec of a file. Secrets have no values.
func FromStored(s events.EnvironmentSpec) EnvironmentSpec {
	out := EnvironmentSpec{Description: s.Description, Variables: make(map[string]Variable, len(s.Variables)), Egress: s.Egress}
	for name, v := range s.Variables {
		if v.Secret {
			v.Value = ""
		}
		out.Variables[name] = Variable{Value: v.Value, Secret: v.Secret, Description: v.Description}
	}
	return out
}

// WriteYAML writes a document in the YAML that Parse reads.
func WriteYAML(w io.Writer, d Document) error {
	switch {
	case d.Agent != nil:
		return writeDocument(w, d, *d.Agent)
	case d.Instance != nil:
		return writeDocument(w, d, *d.Instance)
	case d.Environment != nil:
		return writeDocument(w, d, *d.Environment)
	}
	return fmt.Errorf("write %s %s: it has no spec", d.Kind, d.Ref)
}

func writeDocument[S any](w io.Writer, d Document, spec S) error {
	f := file[S]{d.Kind, d.Ref.Slug, d.Ref.Scope, d.Ref.Org, d.Tags, spec}
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	if err := enc.Encode(valueNode(reflect.ValueOf(f))); err != nil {
		return fmt.Errorf("write %s %s: %w", d.Kind, d.Ref, err)
	}
	return enc.Close()
}

var fileSpecType = reflect.TypeFor[events.FileSpec]()

// valueNode converts a Go value to a YAML node. It leaves out fields that JSON leaves out when they are empty.
func valueNode(v reflect.Value) *yaml.Node {
	if r, ok := v.Interface().(events.Reference); ok {
		return textNode(r.String())
	}
	switch v.Kind() {
	case reflect.Struct:
		n := &yaml.Node{Kind: yaml.MappingNode}
		for _, f := range structFields(v.Type()) {
			value := v.Field(f.index)
			switch {
			case !f.required && isEmptyValue(value):
			case v.Type() == fileSpecType && f.name == "mode":
				n.Content = append(n.Content, textNode(f.name), &yaml.Node{Kind: yaml.ScalarNode, Tag: tagInt, Value: fmt.Sprintf("0o%o", value.Uint())})
			default:
				n.Content = append(n.Content, textNode(f.name), valueNode(value))
			}
		}
		return n
	case reflect.Map:
		n := &yaml.Node{Kind: yaml.MappingNode}
		for _, k := range slices.Sorted(maps.Keys(mapKeys(v))) {
			n.Content = append(n.Content, textNode(k), valueNode(v.MapIndex(reflect.ValueOf(k))))
		}
		return n
	case reflect.Slice:
		n := &yaml.Node{Kind: yaml.SequenceNode}
		for i := range v.Len() {
			n.Content = append(n.Content, valueNode(v.Index(i)))
		}
		return n
	case reflect.Bool:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: tagBool, Value: strconv.FormatBool(v.Bool())}
	case reflect.Uint32:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: tagInt, Value: strconv.FormatUint(v.Uint(), 10)}
	case reflect.Float64:
		return floatNode(v.Float())
	}
	return textNode(v.String())
}

func floatNode(f float64) *yaml.Node {
	if f == math.Trunc(f) && math.Abs(f) < 1<<53 {
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: tagInt, Value: strconv.FormatFloat(f, 'f', -1, 64)}
	}
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: tagFloat, Value: strconv.FormatFloat(f, 'g', -1, 64)}
}

func isEmptyValue(v reflect.Value) bool {
	if v.Kind() == reflect.Map || v.Kind() == reflect.Slice {
		return v.Len() == 0
	}
	return v.IsZero()
}

// textNode returns the YAML scalar of a text. A text of several lines is written as a block if reading the block
// returns the same text.
func textNode(s string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Tag: tagText, Value: s}
	switch {
	case fitsBlockScalar(s):
		n.Style = yaml.LiteralStyle
	case strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }):
		n.Style = yaml.DoubleQuotedStyle // escapes the control characters of terminals
	}
	return n
}

// fitsBlockScalar reports whether a text has several lines and can be written as a YAML block scalar without escapes
// and indentation indicator.
func fitsBlockScalar(s string) bool {
	body := strings.TrimSuffix(s, "\n")
	if !strings.Contains(body, "\n") || strings.HasSuffix(body, "\n") || strings.ContainsAny(s[:1], "\n\t ") {
		return false
	}
	for line := range strings.SplitSeq(body, "\n") {
		if strings.TrimRight(line, " \t") != line {
			return false
		}
	}
	return !strings.ContainsFunc(s, func(r rune) bool {
		return isForbiddenControl(r) || r == '\r' || r == 0x85 || r == 0x2028 || r == 0x2029 || r == 0xfeff
	})
}
