package dependency_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/dependency"
	"github.com/spoolhq/spool/pkg/events"
)

func TestParse_ChecksNPMPackages(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]dependency.Package{
		"left-pad@1.3.0":           {Name: "left-pad", Version: "1.3.0"},
		"JSONStream@1.3.5":         {Name: "JSONStream", Version: "1.3.5"},
		"lodash.merge@4.6.2":       {Name: "lodash.merge", Version: "4.6.2"},
		"@scope/name@1.2.3":        {Name: "@scope/name", Version: "1.2.3"},
		"@a-b/c_d@0.0.0-rc.1":      {Name: "@a-b/c_d", Version: "0.0.0-rc.1"},
		"typescript@5.8.0-dev.2-x": {Name: "typescript", Version: "5.8.0-dev.2-x"},
	} {
		got, err := dependency.ParseNPM(s)
		if err != nil || got.Name != want.Name || got.Version != want.Version || got.String() != s {
			t.Errorf("%s: %+v, %v", s, got, err)
		}
	}
	for _, s := range []string{
		"", "left-pad", "left-pad@", "left-pad@latest", "left-pad@^1.3.0", "left-pad@~1.3.0", "left-pad@1", "left-pad@1.3", "left-pad@1.x.0", "left-pad@*", "left-pad@>=1.0.0",
		"left-pad@01.3.0", "left-pad@1.3.0+build", "left-pad@1.3.0 ", " left-pad@1.3.0", "left-pad@1.3.0\n", "left-pad @1.3.0", "--global@1.3.0", "-g", "-g@1.0.0", "@scope@1.0.0", "@/a@1.0.0",
		"@scope/@1.0.0", "@scope/a/b@1.0.0", "a/b@1.0.0", "../a@1.0.0", "./a@1.0.0", "/a@1.0.0", "file:a@1.0.0", "git+ssh://a@1.0.0", "https://a/b.tgz", "user/repo@1.0.0", "a@npm:b@1.0.0",
		"a@1.0.0;b", "a@1.0.0 b@1.0.0", "$(a)@1.0.0", "a`b`@1.0.0", "a|b@1.0.0", "a\x00@1.0.0", "ä@1.0.0", ".a@1.0.0", "_a@1.0.0", "@.a/b@1.0.0", "@a/.b@1.0.0", "@a/-b@1.0.0",
		strings.Repeat("a", 215) + "@1.0.0", "a@1.0.0-" + strings.Repeat("b", 400),
	} {
		if got, err := dependency.ParseNPM(s); err == nil {
			t.Errorf("%q was accepted: %+v", s, got)
		}
	}
}

func TestParse_ChecksPythonPackages(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]string{
		"requests==2.32.3":                     "requests==2.32.3",
		"Requests==2.32.3":                     "requests==2.32.3",
		"zope.interface==6.0":                  "zope-interface==6.0",
		"a__b-.c==1":                           "a-b-c==1",
		"httpx[http2]==0.27.0":                 "httpx[http2]==0.27.0",
		"httpx[socks,HTTP2,socks]==0.27.0":     "httpx[http2,socks]==0.27.0",
		"torch==2.4.0+cu121":                   "torch==2.4.0+cu121",
		"x==1!2.0rc1.post3.dev4+local.1":       "x==1!2.0rc1.post3.dev4+local.1",
		strings.Repeat("a", 128) + "==1.0.0b2": strings.Repeat("a", 128) + "==1.0.0b2",
	} {
		if got, err := dependency.ParsePIP(s); err != nil || got.String() != want {
			t.Errorf("%s: %s, %v", s, got, err)
		}
	}
	for _, s := range []string{
		"", "requests", "requests==", "requests==2.*", "requests==*", "requests>=2", "requests~=2.0", "requests===2.0", "requests!=2", "requests==2,<3", "requests=2", "requests==latest",
		"requests==2.32.3 ", " requests==2", "requests ==2", "requests== 2", "requests==2\n", "--index-url==1", "-r==1", "-e", "requests[]==1", "requests[a==1", "requests[a,]==1", "requests[,a]==1", "requests[-a]==1",
		"requests@https://x/y.whl", "requests @ file:///x", "git+https://x", "./requests==1", "../x==1", "/x==1", "requests==1; python_version<'3'", "requests==1;x", "$(x)==1", "x==$(y)", "x==1|y", "x==1`y`",
		"x\x00==1", "ä==1", "_x==1", "x_==1", ".x==1", "x==v1", "x==1.0-1", "x==1.0+L", "x==1+", "x==1 --hash=sha256:0", strings.Repeat("a", 129) + "==1", "x==1." + strings.Repeat("1", 400),
	} {
		if got, err := dependency.ParsePIP(s); err == nil {
			t.Errorf("%q was accepted: %+v", s, got)
		}
	}
}

func TestParse_ReportsAllInvalidEntries(t *testing.T) {
	t.Parallel()
	got, err := dependency.Parse(events.Dependencies{NPM: []string{"b@1.0.0", "@a/b@2.0.0", "a@1.0.0"}, PIP: []string{"B_c==1", "a[z,y]==2"}})
	if err != nil || !slices.Equal(got.NPM, []string{"@a/b@2.0.0", "a@1.0.0", "b@1.0.0"}) || !slices.Equal(got.PIP, []string{"a[y,z]==2", "b-c==1"}) || got.IsEmpty() {
		t.Errorf("%+v, %v", got, err)
	}
	if got.String() != "3 of npm and 2 of pip" {
		t.Error(got)
	}
	if none, err := dependency.Parse(events.Dependencies{}); err != nil || !none.IsEmpty() {
		t.Errorf("%+v, %v", none, err)
	}
	_, err = dependency.Parse(events.Dependencies{NPM: []string{"a@1.0.0", "x", "a@2.0.0"}, PIP: []string{"b.c==1", "B_c[x]==2"}})
	for _, want := range []string{`npm[1]: "x": must be an npm package`, `npm[2]: "a" is already in npm[0]`, `pip[1]: "b-c" is already in pip[0]`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not contain %s", err, want)
		}
	}
	many := make([]string, dependency.MaxPackages+1)
	for i := range many {
		many[i] = fmt.Sprintf("p%d==1", i)
	}
	if _, err := dependency.Parse(events.Dependencies{PIP: many[1:]}); err != nil {
		t.Error(err)
	}
	var wrong dependency.Errors
	if _, err := dependency.Parse(events.Dependencies{PIP: many}); !errors.As(err, &wrong) || wrong[0].Index != -1 || wrong.Error() != "pip: has 101 entries; the limit is 100" {
		t.Error(err)
	}
}

// TestDigest_FixedVectors tests that digests do not change between releases: an engine stores layers under their
// digest.
func TestDigest_FixedVectors(t *testing.T) {
	t.Parallel()
	set := dependency.PackageSet{NPM: []string{"a@1.0.0", "b@1.0.0"}, PIP: []string{"c==1"}}
	const golden = "e7510e2f707e0b8ebb163631e2d098d847b8bcc275792e540737056faba5dd7f"
	if got := set.LayerDigest("sha256:1", "linux/amd64"); got != golden {
		t.Errorf("the digest is %s", got)
	}
	seen := map[string]string{golden: "itself"}
	for name, other := range map[string]string{
		"another ground":            set.LayerDigest("sha256:2", "linux/amd64"),
		"another platform":          set.LayerDigest("sha256:1", "linux/arm64"),
		"what both are moved":       set.LayerDigest("sha256:1linux", "/amd64"),
		"another version":           dependency.PackageSet{NPM: []string{"a@1.0.1", "b@1.0.0"}, PIP: set.PIP}.LayerDigest("sha256:1", "linux/amd64"),
		"a package less":            dependency.PackageSet{NPM: []string{"a@1.0.0"}, PIP: set.PIP}.LayerDigest("sha256:1", "linux/amd64"),
		"one of the other list":     dependency.PackageSet{NPM: set.NPM[:1], PIP: []string{"b@1.0.0", "c==1"}}.LayerDigest("sha256:1", "linux/amd64"),
		"two that are joined":       dependency.PackageSet{NPM: []string{"a@1.0.0b@1.0.0"}, PIP: set.PIP}.LayerDigest("sha256:1", "linux/amd64"),
		"all of them in the other":  dependency.PackageSet{PIP: []string{"a@1.0.0", "b@1.0.0", "c==1"}}.LayerDigest("sha256:1", "linux/amd64"),
		"nothing":                   dependency.PackageSet{}.LayerDigest("sha256:1", "linux/amd64"),
		"nothing on nothing at all": dependency.PackageSet{}.LayerDigest("", ""),
	} {
		if before, ok := seen[other]; ok || !events.IsDigest(other) {
			t.Errorf("%s has the digest of %s, %s", name, before, other)
		}
		seen[other] = name
	}
}

// TestDigest_IgnoresOrderAndSpelling tests that neither the order of entries nor the spelling of Python names changes
// a digest.
func TestDigest_IgnoresOrderAndSpelling(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[a-z][a-z0-9]{0,6}`)
		list := rapid.SliceOfNDistinct(name, 0, 6, rapid.ID[string]).Draw(t, "names")
		var d, mixed events.Dependencies
		for _, n := range rapid.Permutation(list).Draw(t, "order") {
			mixed.NPM, mixed.PIP = append(mixed.NPM, n+"@1.0.0"), append(mixed.PIP, strings.ToUpper(n)+"_X==1")
		}
		for _, n := range list {
			d.NPM, d.PIP = append(d.NPM, n+"@1.0.0"), append(d.PIP, n+"-x==1")
		}
		a, err := dependency.Parse(d)
		b, err2 := dependency.Parse(mixed)
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		if a.LayerDigest("i", "p") != b.LayerDigest("i", "p") {
			t.Fatalf("%+v and %+v", a, b)
		}
	})
}

// FuzzParse tests that every accepted entry is one word that an installer can read only as a package, and that Parse
// accepts its normal form unchanged.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"left-pad@1.3.0", "@scope/name@1.2.3-a.b", "requests==2.32.3", "httpx[http2,a.b]==1!0.27.0rc1", "-e==1", "a@npm:b@1.0.0", "a@file:../b", "x @ https://y"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		for list, read := range map[string]func(string) (dependency.Package, error){"npm": dependency.ParseNPM, "pip": dependency.ParsePIP} {
			p, err := read(s)
			if err != nil {
				continue
			}
			text := p.String()
			if text == "" || text[0] == '-' || strings.ContainsAny(text, " \t\r\n\x00'\"`$;&|<>(){}*?\\~#%:") || strings.Contains(text, "..") && list == "pip" || strings.Contains(text, "/") && (list == "pip" || text[0] != '@') {
				t.Fatalf("%s: %q is read as %q", list, s, text)
			}
			if again, err := read(text); err != nil || again.String() != text || again.Name != p.Name || again.Version != p.Version {
				t.Fatalf("%s: %q is read as %q, which is %+v, %v", list, s, text, again, err)
			}
		}
	})
}
