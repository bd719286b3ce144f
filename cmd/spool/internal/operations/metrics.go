package operations

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// metricDescription describes a Prometheus metric that a program serves on /metrics.
type metricDescription struct {
	Name, Kind, Labels, Help string
}

// metricRecorder is a prometheus.Registerer that only records the descriptions of the registered metrics, one for each
// name.
type metricRecorder struct {
	seen map[string]bool
	list []metricDescription
	err  error
}

var _ prometheus.Registerer = (*metricRecorder)(nil)

func (d *metricRecorder) Register(c prometheus.Collector) error {
	descriptions := make(chan *prometheus.Desc, 16)
	go func() {
		defer close(descriptions)
		c.Describe(descriptions)
	}()
	for desc := range descriptions {
		m, err := describeMetric(desc, c)
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

func (d *metricRecorder) MustRegister(list ...prometheus.Collector) {
	for _, c := range list {
		_ = d.Register(c) // Register records the errors
	}
}

func (d *metricRecorder) Unregister(prometheus.Collector) bool { return false }

// A description exposes its parts only as text.
var (
	descPattern       = regexp.MustCompile(`^Desc\{fqName: "([^"]*)", help: "((?:[^"\\]|\\.)*)", constLabels: \{([^}]*)\}, variableLabels: \{([^}]*)\}\}$`)
	constLabelPattern = regexp.MustCompile(`(\w+)="[^"]*"`)
)

// describeMetric converts a metric's descriptor to a description for the documentation.
func describeMetric(desc *prometheus.Desc, c prometheus.Collector) (metricDescription, error) {
	parts := descPattern.FindStringSubmatch(desc.String())
	if parts == nil {
		return metricDescription{}, fmt.Errorf("operations: cannot read %s", desc)
	}
	var labels []string
	for _, l := range constLabelPattern.FindAllStringSubmatch(parts[3], -1) {
		labels = append(labels, l[1])
	}
	if parts[4] != "" {
		labels = append(labels, strings.Split(parts[4], ",")...)
	}
	return metricDescription{Name: parts[1], Kind: metricKind(parts[1], c), Labels: strings.Join(labels, ", "), Help: strings.ReplaceAll(parts[2], `\"`, `"`)}, nil
}

// metricKind returns the kind of a metric: histogram, counter or gauge.
func metricKind(name string, c prometheus.Collector) string {
	switch c.(type) {
	case *prometheus.HistogramVec, prometheus.Histogram:
		return "histogram"
	}
	if strings.HasSuffix(name, "_total") {
		return "counter"
	}
	return "gauge"
}

// registeredMetrics returns the descriptions of the metrics that register registers. If register is nil, it returns
// none.
func registeredMetrics(register func(prometheus.Registerer)) ([]metricDescription, error) {
	if register == nil {
		return nil, nil
	}
	d := &metricRecorder{seen: map[string]bool{}}
	register(d)
	return d.list, d.err
}
