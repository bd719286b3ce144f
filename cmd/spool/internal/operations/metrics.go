package operations

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// metric is the description of a Prometheus metric that a program serves on /metrics.
type metric struct {
	Name, Kind, Labels, Help string
}

// describer is a prometheus.Registerer that only records the descriptions of metrics, one for each name.
type describer struct {
	seen map[string]bool
	list []metric
	err  error
}

var _ prometheus.Registerer = (*describer)(nil)

func (d *describer) Register(c prometheus.Collector) error {
	descriptions := make(chan *prometheus.Desc, 16)
	go func() {
		defer close(descriptions)
		c.Describe(descriptions)
	}()
	for desc := range descriptions {
		m, err := metricOf(desc, c)
		if err != nil {
			d.err = err
		}
		if !d.seen[m.Name] {
			d.seen[m.Name] = true
			d.list = append(d.list, m)
		}
	}
	return nil
}

func (d *describer) MustRegister(list ...prometheus.Collector) {
	for _, c := range list {
		_ = d.Register(c) // Register records the errors
	}
}

func (d *describer) Unregister(prometheus.Collector) bool { return false }

// A description exposes its parts only as text.
var (
	description = regexp.MustCompile(`^Desc\{fqName: "([^"]*)", help: "((?:[^"\\]|\\.)*)", constLabels: \{([^}]*)\}, variableLabels: \{([^}]*)\}\}$`)
	constLabel  = regexp.MustCompile(`(\w+)="[^"]*"`)
)

func metricOf(desc *prometheus.Desc, c prometheus.Collector) (metric, error) {
	parts := description.FindStringSubmatch(desc.String())
	if parts == nil {
		return metric{}, fmt.Errorf("operations: cannot read %s", desc)
	}
	var labels []string
	for _, l := range constLabel.FindAllStringSubmatch(parts[3], -1) {
		labels = append(labels, l[1])
	}
	if parts[4] != "" {
		labels = append(labels, strings.Split(parts[4], ",")...)
	}
	return metric{Name: parts[1], Kind: kind(parts[1], c), Labels: strings.Join(labels, ", "), Help: strings.ReplaceAll(parts[2], `\"`, `"`)}, nil
}

func kind(name string, c prometheus.Collector) string {
	switch c.(type) {
	case *prometheus.HistogramVec, prometheus.Histogram:
		return "histogram"
	}
	if strings.HasSuffix(name, "_total") {
		return "counter"
	}
	return "gauge"
}

// metricsOf returns the metrics that a program registers, or none for nil.
func metricsOf(register func(prometheus.Registerer)) ([]metric, error) {
	if register == nil {
		return nil, nil
	}
	d := &describer{seen: map[string]bool{}}
	register(d)
	return d.list, d.err
}
