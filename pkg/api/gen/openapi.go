package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

// object is a JSON object of unknown shape.
type object = map[string]any

// mergeOpenAPI reads the plugin's output for spool.proto from the file from, corrects what the plugin cannot know about
// the REST API (status codes, problem+json, raw JSON values), adds the hand-written routes of extra, and writes the
// result to the file to.
func mergeOpenAPI(from, extra, to string) error {
	doc, err := readJSON(from)
	if err != nil {
		return err
	}
	byHand, err := readJSON(extra)
	if err != nil {
		return err
	}
	schemas := doc["components"].(object)["schemas"].(object)
	raw := schemas["spool.v1.Json"].(object)
	schemas["spool.v1.Json"] = object{"description": raw["description"]}
	fixNumbers(doc)
	paths := doc["paths"].(object)
	for path, item := range paths {
		for method, op := range item.(object) {
			if err := finish(op.(object)); err != nil {
				return fmt.Errorf("%s %s: %w", method, path, err)
			}
		}
	}
	for path, item := range byHand["paths"].(object) {
		if have, ok := paths[path].(object); ok { // the path has generated and hand-written methods
			maps.Copy(have, item.(object))
			continue
		}
		paths[path] = item
	}
	for _, item := range paths {
		for method, op := range item.(object) {
			if method == "post" || method == "put" || method == "patch" || method == "delete" {
				params, _ := op.(object)["parameters"].([]any)
				op.(object)["parameters"] = append(params, object{"$ref": "#/components/parameters/SpoolUser"})
			}
		}
	}
	components := doc["components"].(object)
	for kind, list := range byHand["components"].(object) {
		if have, ok := components[kind].(object); ok {
			maps.Copy(have, list.(object))
			continue
		}
		components[kind] = list
	}
	for _, key := range []string{"info", "security"} {
		doc[key] = byHand[key]
	}
	return writeJSON(to, doc)
}

// finish sets an operation's success status, its Idempotency-Key header and its error response.
func finish(op object) error {
	id, _ := op["operationId"].(string)
	service, method, ok := strings.Cut(id, "_")
	if !ok {
		return fmt.Errorf("operationId %q is not Service_Method", id)
	}
	full := "/spool.v1." + service + "/" + method
	responses := op["responses"].(object)
	if code := strconv.Itoa(spoolv1.SuccessStatus(full)); code != "200" {
		responses[code] = responses["200"]
		delete(responses, "200")
	}
	if err := fixReferences(op, service, method); err != nil {
		return err
	}
	moveParameters(op, service, method)
	responses["default"] = object{"$ref": "#/components/responses/Problem"}
	if spoolv1.TakesIdempotencyKey(full) {
		params, _ := op["parameters"].([]any)
		op["parameters"] = append(params, object{"$ref": "#/components/parameters/IdempotencyKey"})
	}
	return nil
}

// fixReferences lets the fields of a request's body that hold references accept objects too.
func fixReferences(op object, service, method string) error {
	if _, ok := op["requestBody"].(object); !ok {
		return nil
	}
	schema := bodySchema(op)
	in := spoolv1.File_spool_v1_spool_proto.Services().ByName(protoreflect.Name(service)).Methods().ByName(protoreflect.Name(method)).Input()
	for i := range in.Fields().Len() {
		field := in.Fields().Get(i)
		if !spoolv1.HoldsReference(field.FullName()) {
			continue
		}
		property, ok := schema["properties"].(object)[field.JSONName()].(object)
		if !ok {
			return fmt.Errorf("the body has no property %s", field.JSONName())
		}
		if items, ok := property["items"].(object); ok {
			property = items
		}
		delete(property, "type")
		property["anyOf"] = []any{object{"type": "string"}, object{"$ref": "#/components/schemas/ReferenceObject"}}
	}
	return nil
}

// moveParameters makes parameters of those fields of a request's body that are in the query over REST. A request with such a
// parameter is answered with 200 or with the status of the method.
func moveParameters(op object, service, method string) {
	in := spoolv1.File_spool_v1_spool_proto.Services().ByName(protoreflect.Name(service)).Methods().ByName(protoreflect.Name(method)).Input()
	for i := range in.Fields().Len() {
		field := in.Fields().Get(i)
		if !spoolv1.IsQueryParameter(field.FullName()) {
			continue
		}
		properties := bodySchema(op)["properties"].(object)
		property := properties[field.JSONName()].(object)
		delete(properties, field.JSONName())
		params, _ := op["parameters"].([]any)
		description := property["description"]
		delete(property, "description")
		op["parameters"] = append(params, object{"name": field.JSONName(), "in": "query", "description": description, "schema": property})
		responses := op["responses"].(object)
		responses["200"] = responses["202"]
	}
}

// bodySchema returns the schema of an operation's body.
func bodySchema(op object) object {
	return op["requestBody"].(object)["content"].(object)["application/json"].(object)["schema"].(object)
}

// fixNumbers sets the range of unsigned 32-bit integers; the plugin declares them as int64.
func fixNumbers(v any) {
	switch v := v.(type) {
	case object:
		if v["type"] == "integer" && v["format"] == "int64" {
			delete(v, "format")
			v["minimum"], v["maximum"] = json.Number("0"), json.Number("4294967295")
		}
		for _, child := range v {
			fixNumbers(child)
		}
	case []any:
		for _, child := range v {
			fixNumbers(child)
		}
	}
}

func readJSON(path string) (object, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	var doc object
	if err := dec.Decode(&doc); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return doc, nil
}

func writeJSON(path string, doc object) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(doc); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}
