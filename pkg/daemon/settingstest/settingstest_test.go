package settingstest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

type inner struct {
	Depth int `env:"SPOOL_DEPTH"`
}

type outer struct {
	inner
	Width int `env:"SPOOL_WIDTH"`
	plain int
}

// recorder takes failures in place of a test.
type recorder struct {
	testing.TB
	said []string
}

func (r *recorder) Helper()                      {}
func (r *recorder) Errorf(f string, args ...any) { r.said = append(r.said, fmt.Sprintf(f, args...)) }
func (r *recorder) Fatal(args ...any)            { r.said = append(r.said, fmt.Sprint(args...)) }

func TestCovered(t *testing.T) {
	t.Parallel()
	_ = outer{}.plain
	for want, tests := range map[string]map[string]string{
		"":                                   {"SPOOL_DEPTH": "TestCovered", "SPOOL_WIDTH": "TestCovered"},
		"setting Width (SPOOL_WIDTH) has no": {"SPOOL_DEPTH": "TestCovered"},
		"there is no test TestNothing":       {"SPOOL_DEPTH": "TestCovered", "SPOOL_WIDTH": "TestNothing"},
		"does not name it":                   {"SPOOL_DEPTH": "TestCovered", "SPOOL_WIDTH": "../TestLogLevel"},
		"SPOOL_GONE is no setting":           {"SPOOL_DEPTH": "TestCovered", "SPOOL_WIDTH": "TestCovered", "SPOOL_GONE": "TestCovered"},
	} {
		r := &recorder{}
		Covered(r, &outer{}, tests)
		if want == "" && len(r.said) > 0 || want != "" && !slices.ContainsFunc(r.said, func(s string) bool { return strings.Contains(s, want) }) {
			t.Errorf("%v: %q, want %q", tests, r.said, want)
		}
	}
}
