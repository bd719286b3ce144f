package definition

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/truncate"
)

// Tags of YAML.
const (
	tagNull  = "!!null"
	tagText  = "!!str"
	tagBool  = "!!bool"
	tagInt   = "!!int"
	tagFloat = "!!float"
	tagMerge = "!!merge"
)

var referenceType = reflect.TypeFor[events.Reference]()

// nodeReader fills Go values from YAML nodes, by the JSON names of their fields, and records the position of each
// field. It reads only fields that the Go types have, so the types limit the depth. Error messages contain no values,
// because a value may be a secret.
type nodeReader struct {
	file      string
	errs      Errors
	positions map[string]FilePosition // positions of the fields of the document
	nodes     int                     // number of values that may still be read
	bytes     int
	exhausted bool
}

func (r *nodeReader) addError(p FilePosition, field, format string, args ...any) {
	r.errs = append(r.errs, &Error{File: r.file, FilePosition: p, Field: field, Detail: fmt.Sprintf(format, args...)})
}

// readNode fills the Go value to from the YAML node n. After an error, to has the parts that could be read.
func (r *nodeReader) readNode(n *yaml.Node, to reflect.Value, path string) {
	p := positionOfNode(n)
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if !r.countValue(n, p, path) {
		return
	}
	if path != "" {
		r.positions[path] = p
	}
	t := to.Type()
	switch {
	case t.Kind() == reflect.Interface: // the spec of an unknown kind is not read
	case n.Kind == yaml.ScalarNode && n.ShortTag() == tagNull:
		r.addError(p, path, "is empty: leave it out, or set it to %s", describeType(t))
	case t == referenceType && n.Kind == yaml.ScalarNode:
		r.readReference(n, to, p, path)
	case t == referenceType:
		r.readReferenceObject(n, to, p, path)
	case t.Kind() == reflect.Struct:
		r.readObject(n, to, p, path)
	case t.Kind() == reflect.Slice:
		r.readList(n, to, p, path)
	case t.Kind() == reflect.Map:
		r.readMapping(n, to, p, path)
	default:
		r.readScalar(n, to, p, path)
	}
}

// countValue counts the values that are read and reports whether more are allowed. Aliases count each time they are
// followed.
func (r *nodeReader) countValue(n *yaml.Node, p FilePosition, path string) bool {
	r.nodes--
	r.bytes -= len(n.Value)
	r.exhausted = r.exhausted || len(r.errs) > maxErrors
	if !r.exhausted && (r.nodes < 0 || r.bytes < 0) {
		r.exhausted = true
		r.addError(p, path, "more than %d values, or %d MiB, up to here; the values of an alias count each time", maxNodes, maxReadBytes>>20)
	}
	return !r.exhausted
}

// describeType returns a description of a Go type for error messages, such as "a list".
func describeType(t reflect.Type) string {
	switch {
	case t == referenceType:
		return "a reference: a text such as org/slug@version, or a mapping"
	case t.Kind() == reflect.Struct || t.Kind() == reflect.Map:
		return "a mapping"
	case t.Kind() == reflect.Slice:
		return "a list"
	case t.Kind() == reflect.String:
		return "a text"
	case t.Kind() == reflect.Bool:
		return "true or false"
	case t.Kind() == reflect.Uint32:
		return fmt.Sprintf("a whole number from 0 to %d", uint32(math.MaxUint32))
	}
	return "a number"
}

// forEachPair calls each for every pair of a YAML mapping. It adds errors for keys that are not texts or that are
// repeated.
func (r *nodeReader) forEachPair(n *yaml.Node, t reflect.Type, p FilePosition, path string, each func(key, value *yaml.Node)) bool {
	if n.Kind != yaml.MappingNode {
		r.addError(p, path, "must be %s", describeType(t))
		return false
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content) && !r.exhausted; i += 2 {
		key := n.Content[i]
		at := positionOfNode(key)
		if key.Kind == yaml.AliasNode {
			key = key.Alias
		}
		switch {
		case key.ShortTag() == tagMerge:
			r.addError(at, path, "merge keys (<<) are not supported: write the fields out")
		case key.Kind != yaml.ScalarNode || key.ShortTag() != tagText:
			r.addError(at, path, "has a name that is not a text: put the name in quotes")
		case seen[key.Value]:
			r.addError(at, joinField(path, truncate.Text(key.Value, 64)), "is set twice")
		default:
			seen[key.Value] = true
			if r.countValue(key, at, path) {
				each(&yaml.Node{Value: key.Value, Line: at.Line, Column: at.Column}, n.Content[i+1])
			}
		}
	}
	return true
}

func (r *nodeReader) readObject(n *yaml.Node, to reflect.Value, p FilePosition, path string) {
	known := map[string]structField{}
	var names []string
	for _, f := range structFields(to.Type()) {
		known[f.name] = f
		names = append(names, f.name)
	}
	given := map[string]bool{}
	ok := r.forEachPair(n, to.Type(), p, path, func(key, value *yaml.Node) {
		given[key.Value] = true
		f, ok := known[key.Value]
		if !ok {
			r.addError(positionOfNode(key), joinField(path, truncate.Text(key.Value, 64)), "unknown field; must be one of %s", strings.Join(names, ", "))
			return
		}
		r.readNode(value, to.Field(f.index), joinField(path, f.name))
	})
	for _, f := range structFields(to.Type()) {
		if ok && f.required && !given[f.name] && !r.exhausted {
			r.addError(p, joinField(path, f.name), "is required")
		}
	}
}

// readReference reads a reference that is a string.
func (r *nodeReader) readReference(n *yaml.Node, to reflect.Value, p FilePosition, path string) {
	if n.ShortTag() != tagText {
		r.addError(p, path, "must be %s; put a text that looks like something else in quotes", describeType(referenceType))
		return
	}
	ref, err := events.ParseReference(n.Value)
	var wrong *events.ReferenceError
	switch {
	case errors.As(err, &wrong):
		r.addError(p, path, "%v", wrong)
	case err != nil:
		r.addError(p, path, "%v", err)
	default:
		to.Set(reflect.ValueOf(ref))
	}
}

// readReferenceObject reads a reference that is a mapping.
func (r *nodeReader) readReferenceObject(n *yaml.Node, to reflect.Value, p FilePosition, path string) {
	var object events.ReferenceObject
	r.readObject(n, reflect.ValueOf(&object).Elem(), p, path)
	field := path[strings.LastIndexByte(path, '.')+1:]
	field, _, _ = strings.Cut(field, "[")
	ref, err := object.CheckedReference(field)
	var wrong *events.ReferenceError
	if errors.As(err, &wrong) && wrong.Field == "kind" { // other errors are found with the rest of the definition
		r.addError(r.positions[joinField(path, wrong.Field)], joinField(path, wrong.Field), "%s", wrong.Detail)
		ref = object.ToReference()
	}
	to.Set(reflect.ValueOf(ref))
}

func (r *nodeReader) readList(n *yaml.Node, to reflect.Value, p FilePosition, path string) {
	if n.Kind != yaml.SequenceNode {
		r.addError(p, path, "must be a list")
		return
	}
	for i, c := range n.Content {
		if r.exhausted {
			return
		}
		v := reflect.New(to.Type().Elem()).Elem()
		r.readNode(c, v, joinIndex(path, i))
		to.Set(reflect.Append(to, v))
	}
}

func (r *nodeReader) readMapping(n *yaml.Node, to reflect.Value, p FilePosition, path string) {
	to.Set(reflect.MakeMap(to.Type()))
	r.forEachPair(n, to.Type(), p, path, func(key, value *yaml.Node) {
		v := reflect.New(to.Type().Elem()).Elem()
		r.readNode(value, v, joinField(path, key.Value))
		to.SetMapIndex(reflect.ValueOf(key.Value), v)
	})
}

func (r *nodeReader) readScalar(n *yaml.Node, to reflect.Value, p FilePosition, path string) {
	ok := n.Kind == yaml.ScalarNode
	hint := ""
	switch tag := n.ShortTag(); to.Kind() {
	case reflect.String:
		if ok && tag != tagText {
			ok, hint = false, ": put it in quotes"
		}
		if ok {
			to.SetString(n.Value)
		}
	case reflect.Bool:
		var b bool
		if ok = ok && tag == tagBool && n.Decode(&b) == nil; ok {
			to.SetBool(b)
		}
	default:
		ok = ok && (tag == tagInt || tag == tagFloat) && readNumber(n, to)
	}
	if !ok {
		r.addError(p, path, "must be %s%s", describeType(to.Type()), hint)
	}
}

// readNumber sets to from a YAML number and reports whether the number fits; 3.0 counts as an integer.
func readNumber(n *yaml.Node, to reflect.Value) bool {
	var f float64
	if n.Decode(&f) != nil || math.IsNaN(f) || math.IsInf(f, 0) {
		return false
	}
	if to.Kind() == reflect.Float64 {
		to.SetFloat(f)
		return true
	}
	if f < 0 || f > math.MaxUint32 || f != math.Trunc(f) {
		return false
	}
	to.SetUint(uint64(f))
	return true
}
