// Package settings applies the defaults of a service's settings. The tag default of a setting's field, which the flag
// parser reads too, is the only place that states the default. A command with the same setting refers to it by DefaultVariables.
package settings

import (
	"fmt"
	"log/slog"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// Logging is the log setting of every process. A command line embeds it.
type Logging struct {
	LogLevel slog.Level `default:"info" env:"SPOOL_LOG_LEVEL" help:"Lowest level that is logged: debug, info, warn or error."`
}

// SetDefaults sets every field of a settings struct that is zero and has a tag default to that default. cfg is a
// pointer to the struct; fields of embedded structs are set too. SetDefaults panics if a tag does not parse, or is on a
// field of a type that no setting has.
func SetDefaults(cfg any) {
	v := reflect.ValueOf(cfg).Elem()
	for i := range v.NumField() {
		field := v.Type().Field(i)
		if field.Anonymous && field.Type.Kind() == reflect.Struct {
			SetDefaults(v.Field(i).Addr().Interface())
			continue
		}
		text := field.Tag.Get("default")
		if text == "" || !v.Field(i).IsZero() {
			continue
		}
		if err := parseInto(v.Field(i), text); err != nil {
			panic(fmt.Sprintf("settings: default of %s.%s: %v", v.Type(), field.Name, err))
		}
	}
}

// DefaultVariables returns the defaults of fields as variables that the flag parser replaces in the tags of another
// struct. The name of a variable is prefix, an underscore and the name of the field. cfg is a struct. DefaultVariables
// panics if a field has no tag default.
func DefaultVariables(prefix string, cfg any, fields ...string) map[string]string {
	vars := map[string]string{}
	for _, name := range fields {
		field, _ := reflect.TypeOf(cfg).FieldByName(name)
		text, found := field.Tag.Lookup("default")
		if !found {
			panic(fmt.Sprintf("settings: %T.%s has no default", cfg, name))
		}
		vars[prefix+"_"+name] = text
	}
	return vars
}

func parseInto(to reflect.Value, text string) error {
	if to.Type() == reflect.TypeFor[time.Duration]() {
		d, err := time.ParseDuration(text)
		to.SetInt(int64(d))
		return err
	}
	switch to.Interface().(type) {
	case string:
		to.SetString(text)
	case bool:
		b, err := strconv.ParseBool(text)
		to.SetBool(b)
		return err
	case int, int64:
		n, err := strconv.ParseInt(text, 10, 64)
		to.SetInt(n)
		return err
	case float64:
		f, err := strconv.ParseFloat(text, 64)
		to.SetFloat(f)
		return err
	case []string:
		to.Set(reflect.ValueOf(strings.Split(text, ",")))
	default:
		return fmt.Errorf("type %s", to.Type())
	}
	return nil
}
