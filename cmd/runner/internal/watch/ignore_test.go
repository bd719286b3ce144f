package watch

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/ignore"
)

func TestIgnoredAnyway(t *testing.T) {
	t.Parallel()
	rules, err := ignore.Parse([]byte(defaultIgnoreRules))
	if err != nil {
		t.Fatal(err)
	}
	for want, paths := range map[bool]string{
		true:  ".git/ a/.git/ .git node_modules/ x/node_modules/ .venv/ a.swp x/.b.swp .spool-put-X a/.spool-put-Y",
		false: "git swp a.swpx .gitignore node_modules.txt",
	} {
		for path := range strings.FieldsSeq(paths) {
			rel, folder := strings.CutSuffix(path, "/")
			if got := rules.Ignores(rel, folder); got != want {
				t.Errorf("%q ignored: %v, want %v", path, got, want)
			}
		}
	}
}
