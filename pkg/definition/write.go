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

// Stored converts a server's environment into the form of a file. Secrets have no values.
func Stored(s events.EnvironmentSpec) EnvironmentSpec {
	out := EnvironmentSpec{Description: s.Description, Variables: make(map[string]Variable, len(s.Variables)), Egress: s.Egress}
	for name, v := range s.Variables {
		if v.Secret {
			v.Value = ""
		}
		out.Variables[name] = Variable{Value: v.Value, Secret: v.Secret, Description: v.Description}
	}
	return out
}

// Write writes a document in YAML, as Parse reads it.
func Write(w io.Writer, d Document) error {
	switch {
	case d.Agent != nil:
		return write(w, d, *d.Agent)
	case d.Instance != nil:
		return write(w, d, *d.Instance)
	case d.Environment != nil:
		return write(w, d, *d.Environment)
	}
	return fmt.Errorf("write %s %s: it has no spec", d.Kind, d.Ref)
}

func write[S any](w io.Writer, d Document, spec S) error {
	f := file[S]{d.Kind, d.Ref.Slug, d.Ref.Scope, d.Ref.Org, d.Tags, spec}
	enc := yaml.NewEncoder(w)
	enc.SetIndent(2)
	if err := enc.Encode(node(reflect.ValueOf(f))); err != nil {
		return fmt.Errorf("write %s %s: %w", d.Kind, d.Ref, err)
	}
	return enc.Close()
}

var typeFile = reflect.TypeFor[events.FileSpec]()

// node converts a value to YAML. It leaves out fields that JSON leaves out when they are empty.
func node(v reflect.Value) *yaml.Node {
	if r, ok := v.Interface().(events.Reference); ok {
		return text(r.String())
	}
	switch v.Kind() {
	case reflect.Struct:
		n := &yaml.Node{Kind: yaml.MappingNode}
		for _, f := range fieldsOf(v.Type()) {
			value := v.Field(f.index)
			switch {
			case !f.required && empty(value):
			case v.Type() == typeFile && f.name == "mode":
				n.Content = append(n.Content, text(f.name), &yaml.Node{Kind: yaml.ScalarNode, Tag: tagInt, Value: fmt.Sprintf("0o%o", value.Uint())})
			default:
				n.Content = append(n.Content, text(f.name), node(value))
			}
		}
		return n
	case reflect.Map:
		n := &yaml.Node{Kind: yaml.MappingNode}
		for _, k := range slices.Sorted(maps.Keys(keys(v))) {
			n.Content = append(n.Content, text(k), node(v.MapIndex(reflect.ValueOf(k))))
		}
		return n
	case reflect.Slice:
		n := &yaml.Node{Kind: yaml.SequenceNode}
		for i := range v.Len() {
			n.Content = append(n.Content, node(v.Index(i)))
		}
		return n
	case reflect.Bool:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: tagBool, Value: strconv.FormatBool(v.Bool())}
	case reflect.Uint32:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: tagInt, Value: strconv.FormatUint(v.Uint(), 10)}
	case reflect.Float64:
		return float(v.Float())
	}
	return text(v.String())
}

func float(f float64) *yaml.Node {
	if f == math.Trunc(f) && math.Abs(f) < 1<<53 {
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: tagInt, Value: strconv.FormatFloat(f, 'f', -1, 64)}
	}
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: tagFloat, Value: strconv.FormatFloat(f, 'g', -1, 64)}
}

func empty(v reflect.Value) bool {
	if v.Kind() == reflect.Map || v.Kind() == reflect.Slice {
		return v.Len() == 0
	}
	return v.IsZero()
}

// text returns a scalar. A text of several lines is written as a block if reading the block returns the same text.
func text(s string) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Tag: tagText, Value: s}
	switch {
	case fitsBlockScalar(s):
		n.Style = yaml.LiteralStyle
	case strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }):
		n.Style = yaml.DoubleQuotedStyle // escapes the control characters of terminals
	}
	return n
}

// fitsBlockScalar reports whether a text has several lines and needs neither escapes nor an indentation indicator.
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
		return control(r) || r == '\r' || r == 0x85 || r == 0x2028 || r == 0x2029 || r == 0xfeff
	})
}
