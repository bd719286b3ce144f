package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// maxSchemaWork is the largest number of JSON values in a schema whose references are replaced by what they refer to. The time of a
// validation grows with this number, which references can make exponential.
const maxSchemaWork = 10_000

// checkSchema returns INVALID_REQUEST for the first part of a request's field that does not match a JSON schema. The schema comes from an
// agent or an MCP server, which check the value themselves as well: a schema that cannot be evaluated without loading another document, or
// only with much work, accepts every value. The value must be valid JSON.
func checkSchema(field string, schema, value json.RawMessage) error {
	compiled := compileSchema(schema)
	if compiled == nil {
		return nil
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(value))
	if err != nil {
		return problem.Invalid(field, "the text is not valid JSON")
	}
	var wrong *jsonschema.ValidationError
	if !errors.As(compiled.Validate(v), &wrong) {
		return nil
	}
	for len(wrong.Causes) > 0 {
		wrong = wrong.Causes[0]
	}
	for _, name := range wrong.InstanceLocation {
		if _, err := strconv.Atoi(name); err == nil {
			field += "[" + name + "]"
		} else {
			field += "." + truncate.Text(name, 100)
		}
	}
	detail := "the value does not match the schema of the request"
	if o := wrong.BasicOutput(); o.Error != nil {
		detail = o.Error.String()
	} else if len(o.Errors) > 0 && o.Errors[0].Error != nil {
		detail = o.Errors[0].Error.String()
	}
	return problem.Invalid(truncate.Text(field, 500), "%s", truncate.Text(detail, 500))
}

// compileSchema compiles a JSON schema. It returns nil for a schema that cannot be evaluated.
func compileSchema(schema json.RawMessage) *jsonschema.Schema {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(schema))
	if err != nil {
		return nil
	}
	work := maxSchemaWork
	if !spendSchemaWork(doc, doc, &work) {
		return nil
	}
	const url = "request:///schema.json"
	c := jsonschema.NewCompiler()
	c.UseLoader(refusingLoader{})
	if c.AddResource(url, doc) != nil {
		return nil
	}
	s, err := c.Compile(url)
	if err != nil {
		return nil
	}
	return s
}

// spendSchemaWork subtracts the number of JSON values in part, a part of the schema root, from work, and reports
// whether enough was left. It counts what a reference refers to once for each reference, so that a recursive schema
// uses up any amount of work.
func spendSchemaWork(root, part any, work *int) bool {
	if *work--; *work < 0 {
		return false
	}
	switch part := part.(type) {
	case []any:
		for _, v := range part {
			if !spendSchemaWork(root, v, work) {
				return false
			}
		}
	case map[string]any:
		for name, v := range part {
			ref, isText := v.(string)
			switch {
			case name == "$dynamicRef", name == "$recursiveRef", name == "$id", name == "id" && isText && strings.Contains(ref, ":"):
				return false // the reference, or others in the schema, cannot be resolved by its text
			case name == "$ref" && isText:
				var ok bool
				if v, ok = resolveSchemaRef(root, ref); !ok {
					return false
				}
			}
			if !spendSchemaWork(root, v, work) {
				return false
			}
		}
	}
	return true
}

// resolveSchemaRef returns the part of a schema to which a reference of the form #/definitions/name refers.
func resolveSchemaRef(root any, ref string) (part any, ok bool) {
	path, ok := strings.CutPrefix(ref, "#")
	if !ok {
		return nil, false
	}
	part = root
	for i, name := range strings.Split(path, "/") {
		if i == 0 {
			if name != "" {
				return nil, false // an anchor
			}
			continue
		}
		m, isObject := part.(map[string]any)
		if part, ok = m[strings.NewReplacer("~1", "/", "~0", "~").Replace(name)]; !isObject || !ok {
			return nil, false
		}
	}
	return part, true
}

// refusingLoader is a jsonschema.URLLoader that refuses every document, so that a schema cannot make the gateway load one.
type refusingLoader struct{}

// errOtherDocument is returned for a schema that refers to another document.
var errOtherDocument = errors.New("schemas of requests cannot refer to other documents")

// Load implements jsonschema.URLLoader.
func (refusingLoader) Load(string) (any, error) { return nil, errOtherDocument }
