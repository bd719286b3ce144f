package settings_test

import (
	"reflect"
	"testing"
	"time"

	"github.com/alecthomas/kong"

	"github.com/spoolhq/spool/pkg/settings"
)

type config struct {
	Address string        `default:"127.0.0.1:7700"`
	Pull    bool          `default:"true"`
	Workers int           `default:"64"`
	Bytes   int64         `default:"4294967296"`
	Price   float64       `default:"0.5"`
	Every   time.Duration `default:"1m30s"`
	Names   []string      `default:"local,docker"`
	Plain   string
	Empty   []string `default:""`
	Shared
}

// Shared is a struct that the configs of several services embed.
type Shared struct {
	Percent int `default:"10"`
}

func TestDefault_SetsWhatTheFlagParserSets(t *testing.T) {
	t.Parallel()
	var want, got config
	parser, err := kong.New(&want)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := parser.Parse(nil); err != nil {
		t.Fatal(err)
	}
	settings.SetDefaults(&got)
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestDefault_LeavesWhatIsSet(t *testing.T) {
	t.Parallel()
	want := config{"a", true, 1, 2, 3, 4, []string{"b"}, "c", []string{"d"}, Shared{5}}
	got := want
	settings.SetDefaults(&got)
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestVars_GiveAnotherStructTheDefaults(t *testing.T) {
	t.Parallel()
	var got struct {
		Every   time.Duration `default:"${config_Every}"`
		Workers int           `default:"${config_Workers}"`
	}
	parser, err := kong.New(&got, kong.Vars(settings.DefaultVariables("config", config{}, "Every", "Workers")))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := parser.Parse(nil); err != nil {
		t.Fatal(err)
	}
	if got.Every != 90*time.Second || got.Workers != 64 {
		t.Errorf("got %+v", got)
	}
}

func TestVars_PanicsAtAFieldWithoutADefault(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"Plain", "Unknown"} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			settings.DefaultVariables("config", config{}, name)
		}()
	}
}

func TestDefault_PanicsAtATagThatDoesNotParse(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]any{
		"a number": &struct {
			N int `default:"many"`
		}{},
		"a duration": &struct {
			D time.Duration `default:"1"`
		}{},
		"a type without a setting": &struct {
			C chan int `default:"1"`
		}{},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			settings.SetDefaults(cfg)
		}()
	}
}
