package ignore_test

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/ignore"
)

func TestIgnores_FollowsGitignore(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		rules   string
		ignored string // a trailing slash marks a folder
		kept    string
	}{
		{"", "", "a .b c/d"},
		{"# a comment\n\n*.log", "a.log d/a.log .log d.log/", "log a.logs # a"},
		{"*.log\n!keep.log", "a.log x/a.log", "keep.log x/keep.log"},
		{"!keep.log\n*.log", "keep.log", ""},
		{"build/", "build/ a/build/", "build a/build builds/"},
		{"/top", "top top/", "a/top"},
		{"a/b", "a/b a/b/", "x/a/b b"},
		{"a/b/", "a/b/", "a/b x/a/b/"},
		{"**/c", "c a/c a/b/c", "cc"},
		{"a/**", "a/b a/b/c a/b/", "a/ a b"},
		{"a/**/z", "a/z a/b/z a/b/c/z", "z b/z a/zz"},
		{"?x[0-9].t[!a]t", "ax1.tbt d/bx9.tct", "x1.tbt ax1.tat aax1.tbt"},
		{`\#a` + "\n" + `\!b` + "\n" + `c\ ` + "\nd  ", "#a !b c\u00a0 d", "c"},
		{"x\r\ny\r\n", "x y", "z"},
		{"/", "", "a b/"},
	} {
		rs, err := ignore.Parse([]byte(tc.rules))
		if err != nil {
			t.Errorf("%q: %v", tc.rules, err)
		}
		for want, paths := range map[bool]string{true: tc.ignored, false: tc.kept} {
			for path := range strings.FieldsSeq(strings.ReplaceAll(paths, "\u00a0", "")) {
				rel, folder := strings.CutSuffix(path, "/")
				if rel == "c" && strings.Contains(tc.rules, `\ `) && want {
					rel = "c "
				}
				if got := rs.Ignores(rel, folder); got != want {
					t.Errorf("%q: %q ignored: %v, want %v", tc.rules, path, got, want)
				}
			}
		}
	}
	rs, err := ignore.Parse([]byte("good\n[bad\nalso\xff\n*.tmp"))
	if err == nil || !strings.Contains(err.Error(), "line 2") || !strings.Contains(err.Error(), "line 3") || len(rs) != 2 {
		t.Errorf("%d rules, %v", len(rs), err)
	}
}
