package operations

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// TestMarkdown_IsUpToDate tests that docs/operations.md matches the programs.
func TestMarkdown_IsUpToDate(t *testing.T) {
	t.Parallel()
	want, err := GenerateMarkdown()
	if err != nil {
		t.Fatal(err)
	}
	have, err := os.ReadFile("../../../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != want {
		t.Error("docs/operations.md is out of date: run make generate")
	}
}

// TestMarkdown_ExplainsEachSetting tests that each setting has a variable, an explanation that ends with a full stop,
// and a row in the document.
func TestMarkdown_ExplainsEachSetting(t *testing.T) {
	t.Parallel()
	text, err := GenerateMarkdown()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range documentedPrograms() {
		list, err := parseSettings(p.cli)
		if err != nil || len(list) == 0 {
			t.Fatalf("%s: %d settings, %v", p.Name, len(list), err)
		}
		for _, s := range list {
			if s.Variable == "" || !strings.HasSuffix(s.Help, ".") || len(s.Help) < 10 {
				t.Errorf("%s: %+v", p.Name, s)
			}
			row := regexp.MustCompile(`(?m)^\| ` + regexp.QuoteMeta("`"+s.Flag+"` | `"+s.Variable+"` | ") + `.* \|$`)
			if !row.MatchString(text) {
				t.Errorf("%s: %s has no row", p.Name, s.Flag)
			}
		}
	}
}

// TestMarkdown_NamesOnlySettingsThatExist tests that each variable in the text is a setting of a program, or of compose.
func TestMarkdown_NamesOnlySettingsThatExist(t *testing.T) {
	t.Parallel()
	compose, err := os.ReadFile("../../../../deploy/compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var known []string
	for _, p := range documentedPrograms() {
		list, err := parseSettings(p.cli)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list {
			known = append(known, s.Variable)
		}
	}
	commands, err := spoolCommands()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range commands {
		for _, s := range c.Settings {
			known = append(known, s.Variable)
		}
	}
	for _, name := range regexp.MustCompile(`SPOOL_[A-Z_]+[A-Z]`).FindAllString(markdownTemplate, -1) {
		if name != "SPOOL_RUNNER" && !slices.Contains(known, name) && !strings.Contains(string(compose), "${"+name+":") && !strings.Contains(string(compose), " "+name+": ") {
			t.Errorf("%s is no setting", name)
		}
	}
	metrics := map[string]bool{}
	for _, p := range documentedPrograms() {
		list, err := registeredMetrics(p.metrics)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range list {
			metrics[m.Name] = true
		}
	}
	for _, name := range regexp.MustCompile(`spool_[a-z_]+[a-z]`).FindAllString(markdownTemplate, -1) {
		if !metrics[name] {
			t.Errorf("%s is no metric", name)
		}
	}
}

func TestMetricsOf_ReturnsEachMetricOnce(t *testing.T) {
	t.Parallel()
	got, err := registeredMetrics(func(r prometheus.Registerer) {
		r.MustRegister(
			prometheus.NewCounterVec(prometheus.CounterOpts{Name: "a_total", Help: `How often "it" was.`}, []string{"x", "y"}),
			prometheus.NewHistogram(prometheus.HistogramOpts{Name: "b_seconds", Help: "Time."}),
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "c", Help: "Now.", ConstLabels: prometheus.Labels{"group": "1"}}, nil),
			prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "c", Help: "Now.", ConstLabels: prometheus.Labels{"group": "2"}}, nil),
		)
	})
	want := []metricDescription{{"a_total", "counter", "x, y", `How often "it" was.`}, {"b_seconds", "histogram", "", "Time."}, {"c", "gauge", "group", "Now."}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got  %+v, %v\nwant %+v", got, err, want)
	}
}
