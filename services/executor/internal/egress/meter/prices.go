package meter

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
)

//go:embed prices.yaml
var defaultPrices []byte

// rates are the prices of a model in US dollars per million tokens. A nil rate means the rate of Input.
type rates struct {
	Input          *float64 `yaml:"input"`
	Output         *float64 `yaml:"output"`
	CacheRead      *float64 `yaml:"cacheRead"`
	CacheWrite     *float64 `yaml:"cacheWrite"`
	CacheWriteHour *float64 `yaml:"cacheWriteHour"`
}

// longContextRates are the rates of requests with more than Over input tokens.
type longContextRates struct {
	Over  uint64 `yaml:"over"`
	rates `yaml:",inline"`
}

// price is an entry of the price table.
type price struct {
	Provider string `yaml:"provider"`
	Model    string `yaml:"model"`
	rates    `yaml:",inline"`
	Long     *longContextRates `yaml:"long"`
}

// Prices is an immutable table of the prices of models' tokens.
type Prices struct {
	version string
	models  []price
}

// DefaultPrices returns the built-in table of prices.
func DefaultPrices() (Prices, error) { return ParsePrices("prices.yaml", defaultPrices) }

// ParsePrices parses a table of prices in YAML or JSON. An error names file, the entry and its field.
func ParsePrices(file string, data []byte) (Prices, error) {
	var doc struct {
		Version string  `yaml:"version"`
		Models  []price `yaml:"models"`
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	if err := dec.Decode(&doc); err != nil && !errors.Is(err, io.EOF) {
		return Prices{}, fmt.Errorf("%s: %w", file, err)
	}
	if doc.Version == "" {
		return Prices{}, fmt.Errorf("%s: version: it is empty: costs are recorded with it", file)
	}
	known := map[string]bool{}
	for i, p := range doc.Models {
		if err := p.check(); err != nil {
			return Prices{}, fmt.Errorf("%s: models[%d] (%s): %w", file, i, p.Model, err)
		}
		if key := p.Provider + " " + p.Model; known[key] {
			return Prices{}, fmt.Errorf("%s: models[%d] (%s): there is an entry for it already", file, i, p.Model)
		} else {
			known[key] = true
		}
	}
	return Prices{version: doc.Version, models: doc.Models}, nil
}

func (p price) check() error {
	switch {
	case p.Provider == "":
		return errors.New("provider: it is empty")
	case p.Model == "":
		return errors.New("model: it is empty")
	}
	if err := p.rates.check(); err != nil || p.Long == nil {
		return err
	}
	if p.Long.Over == 0 {
		return errors.New("long.over: it is absent: how many tokens of input make a request long")
	}
	if err := p.Long.check(); err != nil {
		return fmt.Errorf("long.%w", err)
	}
	return nil
}

func (r rates) check() error {
	for _, f := range []struct {
		name     string
		value    *float64
		required bool
	}{{"input", r.Input, true}, {"output", r.Output, true}, {"cacheRead", r.CacheRead, false}, {"cacheWrite", r.CacheWrite, false}, {"cacheWriteHour", r.CacheWriteHour, false}} {
		if f.value == nil {
			if f.required {
				return fmt.Errorf("%s: it is absent", f.name)
			}
			continue
		}
		if *f.value < 0 || math.IsNaN(*f.value) || math.IsInf(*f.value, 0) {
			return fmt.Errorf("%s: %v is not a price", f.name, *f.value)
		}
	}
	return nil
}

// modelSuffix matches the text after a model's name, such as a date, with which the model still has the same price.
var modelSuffix = regexp.MustCompile(`^([-@](latest|v?\d{4,8}|\d{4}-\d{2}-\d{2}))?([:@].*)?$`)

// findPrice returns the entry of the table whose name is the longest that matches a model.
func (t Prices) findPrice(provider, model string) (price, bool) {
	var best price
	found := false
	for _, p := range t.models {
		name, all := strings.CutSuffix(p.Model, "*")
		rest, ok := strings.CutPrefix(model, name)
		if p.Provider != provider || !ok || !all && !modelSuffix.MatchString(rest) {
			continue
		}
		if !found || len(p.Model) > len(best.Model) {
			best, found = p, true
		}
	}
	return best, found
}

// EntryName returns the name of the table's entry for a model, and false if the table has no price for the model.
func (t Prices) EntryName(provider, model string) (string, bool) {
	p, ok := t.findPrice(provider, model)
	return p.Model, ok
}

// Cost returns what an answer of a model costs in US dollars, and the version of the price table. Without a price for
// the model it returns 0 and "".
func (t Prices) Cost(provider, model string, r Result) (float64, string) {
	p, ok := t.findPrice(provider, model)
	if !ok {
		return 0, ""
	}
	u := r.Usage
	by := p.rates
	if p.Long != nil && uint64(u.InputTokens)+uint64(u.CacheReadTokens)+uint64(u.CacheWriteTokens) > p.Long.Over {
		by = p.Long.rates
	}
	or := func(r, unset *float64) *float64 {
		if r == nil {
			return unset
		}
		return r
	}
	write := or(by.CacheWrite, by.Input)
	hour := min(r.Hour, u.CacheWriteTokens)
	sum := float64(u.InputTokens)**by.Input + float64(u.OutputTokens)**by.Output +
		float64(u.CacheReadTokens)**or(by.CacheRead, by.Input) +
		float64(u.CacheWriteTokens-hour)**write + float64(hour)**or(by.CacheWriteHour, write)
	return sum / 1e6, t.version
}
