package docs

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// root is the root folder of the repository, relative to this package.
const root = "../.."

func TestRetiredWords_AreNotUsedInGoCode(t *testing.T) {
	t.Parallel()
	glossary, err := os.ReadFile(root + "/docs/glossary.md")
	if err != nil {
		t.Fatal(err)
	}
	words, err := RetiredWords(string(glossary))
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, path := range files(t, ".go") {
		source, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		uses, err := FindRetiredUses(path, source, words)
		if err != nil {
			t.Fatal(err)
		}
		for _, u := range uses {
			t.Errorf("%s: %q uses the retired word %q; use: %s (docs/glossary.md)", u.Position, u.In, u.Word, words[u.Word])
		}
		checked++
	}
	if checked < 1000 {
		t.Errorf("checked %d Go files, want at least 1000", checked)
	}
}

func TestRetiredUses_FindsIdentifiersAndComments(t *testing.T) {
	t.Parallel()
	words := map[string]string{"letGo": "release", "poke": "wake", "wayOut": "egressClient"}
	for _, c := range []struct {
		name, source string
		want         []string // line:word
	}{
		{"an identifier", "package p\nfunc letGo() {}\n", []string{"2:letGo"}},
		{"a part of an identifier", "package p\nvar hasLetGo, pokeAll int\n", []string{"2:letGo", "2:poke"}},
		{"an exported identifier, a field and a package", "package poke\ntype T struct { WayOut int }\n", []string{"1:poke", "2:wayOut"}},
		{"a name with underscores and initials", "package p\nfunc Test_HTTPPoke_All() {}\n", []string{"2:poke"}},
		{"a comment", "package p\n\n// letGo ends what the poke began.\nvar x int\n", []string{"3:letGo", "3:poke"}},
		{"the second line of a comment", "package p\n\n/* one\n poke */\n", []string{"4:poke"}},
		{"another word that holds the word", "package p\n// He spoke, let go, and found a way out.\nvar spoke, letGoods int\n", nil},
		{"a string", "package p\nconst s = \"poke letGo\"\n", nil},
	} {
		uses, err := FindRetiredUses("x.go", []byte(c.source), words)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		var got []string
		for _, u := range uses {
			got = append(got, string(rune('0'+u.Position.Line))+":"+u.Word)
		}
		slices.Sort(got)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: found %v, want %v", c.name, got, c.want)
		}
	}
}

func TestRetiredWords_ReadsOnlyTheSection(t *testing.T) {
	t.Parallel()
	words, err := RetiredWords("# G\n\n| `kept` | x |\n\n## Retired words\n| retired | use |\n| --- | --- |\n| `letGo`, `giveBack` | release |\n\n## More\n| `other` | y |\n")
	if err != nil || len(words) != 2 || words["letGo"] != "release" || words["giveBack"] != "release" {
		t.Errorf("words are %v, %v", words, err)
	}
	for _, glossary := range []string{"# G\n| `a` | b |\n", "# G\n\n## Retired words\nnone\n"} {
		if words, err := RetiredWords(glossary); err == nil {
			t.Errorf("no error for %q: %v", glossary, words)
		}
	}
}

// files returns the files of the repository with a suffix, relative to its root. It leaves out folders that git does
// not store: their names begin with a dot, or are bin or node_modules. It also leaves out testdata.
func files(t *testing.T, suffix string) []string {
	t.Helper()
	var list []string
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			switch name := d.Name(); {
			case path == root:
			case strings.HasPrefix(name, "."), name == "bin", name == "node_modules", name == "testdata":
				return filepath.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(path, suffix) {
			rel, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			list = append(list, filepath.ToSlash(rel))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}
