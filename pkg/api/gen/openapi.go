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

// jsonObject is a JSON object of unknown shape.
type jsonObject = map[string]any

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
	schemas := doc["components"].(jsonObject)["schemas"].(jsonObject)
	raw := schemas["spool.v1.Json"].(jsonObject)
	schemas["spool.v1.Json"] = jsonObject{"description": raw["description"]}
	setUint32Ranges(doc)
	paths := doc["paths"].(jsonObject)
	for path, item := range paths {
		for method, op := range item.(jsonObject) {
			if err := finishOperation(op.(jsonObject)); err != nil {
				return fmt.Errorf("%s %s: %w", method, path, err)
			}
		}
	}
	for path, item := range byHand["paths"].(jsonObject) {
		if have, ok := paths[path].(jsonObject); ok { // the path has generated and hand-written methods
			maps.Copy(have, item.(jsonObject))
			continue
		}
		paths[path] = item
	}
	for _, item := range paths {
		for method, op := range item.(jsonObject) {
			if method == "post" || method == "put" || method == "patch" || method == "delete" {
				params, _ := op.(jsonObject)["parameters"].([]any)
				op.(jsonObject)["parameters"] = append(params, jsonObject{"$ref": "#/components/parameters/SpoolUser"})
			}
		}
	}
	components := doc["components"].(jsonObject)
	for kind, list := range byHand["components"].(jsonObject) {
		if have, ok := components[kind].(jsonObject); ok {
			maps.Copy(have, list.(jsonObject))
			continue
		}
		components[kind] = list
	}
	for _, key := range []string{"info", "security"} {
		doc[key] = byHand[key]
	}
	return writeJSON(to, doc)
}

// finishOperation sets an operation's success status, its Idempotency-Key header and its error response.
func finishOperation(op jsonObject) error {
	id, _ := op["operationId"].(string)
	service, method, ok := strings.Cut(id, "_")
	if !ok {
		return fmt.Errorf("operationId %q is not Service_Method", id)
	}
	full := "/spool.v1." + service + "/" + method
	responses := op["responses"].(jsonObject)
	if code := strconv.Itoa(spoolv1.SuccessStatus(full)); code != "200" {
		responses[code] = responses["200"]
		delete(responses, "200")
	}
	if err := allowReferenceObjects(op, service, method); err != nil {
		return err
	}
	moveParametersToQuery(op, service, method)
	responses["default"] = jsonObject{"$ref": "#/components/responses/Problem"}
	if spoolv1.TakesIdempotencyKey(full) {
		params, _ := op["parameters"].([]any)
		op["parameters"] = append(params, jsonObject{"$ref": "#/components/parameters/IdempotencyKey"})
	}
	return nil
}

// allowReferenceObjects changes the schema of a request's body so that each field that holds a reference accepts an
// object as well as a string.
func allowReferenceObjects(op jsonObject, service, method string) error {
	if _, ok := op["requestBody"].(jsonObject); !ok {
		return nil
	}
	schema := requestBodySchema(op)
	in := spoolv1.File_spool_v1_spool_proto.Services().ByName(protoreflect.Name(service)).Methods().ByName(protoreflect.Name(method)).Input()
	for i := range in.Fields().Len() {
		field := in.Fields().Get(i)
		if !spoolv1.HoldsReference(field.FullName()) {
			continue
		}
		property, ok := schema["properties"].(jsonObject)[field.JSONName()].(jsonObject)
		if !ok {
			return fmt.Errorf("the body has no property %s", field.JSONName())
		}
		if items, ok := property["items"].(jsonObject); ok {
			property = items
		}
		delete(property, "type")
		property["anyOf"] = []any{jsonObject{"type": "string"}, jsonObject{"$ref": "#/components/schemas/ReferenceObject"}}
	}
	return nil
}

// moveParametersToQuery moves those fields of a request's body that REST clients send in the query into the operation's
// parameters. Because such a parameter lets the request wait, the operation is also documented with status 200.
func moveParametersToQuery(op jsonObject, service, method string) {
	in := spoolv1.File_spool_v1_spool_proto.Services().ByName(protoreflect.Name(service)).Methods().ByName(protoreflect.Name(method)).Input()
	for i := range in.Fields().Len() {
		field := in.Fields().Get(i)
		if !spoolv1.IsQueryParameter(field.FullName()) {
			continue
		}
		properties := requestBodySchema(op)["properties"].(jsonObject)
		property := properties[field.JSONName()].(jsonObject)
		delete(properties, field.JSONName())
		params, _ := op["parameters"].([]any)
		description := property["description"]
		delete(property, "description")
		op["parameters"] = append(params, jsonObject{"name": field.JSONName(), "in": "query", "description": description, "schema": property})
		responses := op["responses"].(jsonObject)
		responses["200"] = responses["202"]
	}
}

// requestBodySchema returns the schema of an operation's body.
func requestBodySchema(op jsonObject) jsonObject {
	return op["requestBody"].(jsonObject)["content"].(jsonObject)["application/json"].(jsonObject)["schema"].(jsonObject)
}

// setUint32Ranges sets the minimum and maximum of unsigned 32-bit integers, which the OpenAPI plugin declares as int64.
func setUint32Ranges(v any) {
	switch v := v.(type) {
	case jsonObject:
		if v["type"] == "integer" && v["format"] == "int64" {
			delete(v, "format")
			v["minimum"], v["maximum"] = json.Number("0"), json.Number("4294967295")
		}
		for _, child := range v {
			setUint32Ranges(child)
		}
	case []any:
		for _, child := range v {
			setUint32Ranges(child)
		}
	}
}

func readJSON(path string) (jsonObject, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	var doc jsonObject
	if err := dec.Decode(&doc); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return doc, nil
}

func writeJSON(path string, doc jsonObject) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(doc); err != nil {
		return err
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}
