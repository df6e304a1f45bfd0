package script

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// ParseRules reads rules as JSON: one rule, a list of rules, or an object with
// a list under "rules". Unknown fields are errors: a mistyped match would
// otherwise match everything. The rules are not validated yet; adding them to
// an engine does that.
func ParseRules(data []byte) ([]Rule, error) {
	data = bytes.TrimSpace(data)
	if len(data) == 0 {
		return nil, errors.New("no rules: the input is empty")
	}
	if data[0] == '[' {
		var rules []Rule
		return rules, strict(data, &rules)
	}
	var probe map[string]json.RawMessage
	if err := json.Unmarshal(data, &probe); err != nil {
		return nil, fmt.Errorf("rules: %w", err)
	}
	if _, ok := probe["rules"]; ok {
		var file struct {
			Rules []Rule `json:"rules"`
		}
		err := strict(data, &file)
		return file.Rules, err
	}
	var r Rule
	if err := strict(data, &r); err != nil {
		return nil, err
	}
	return []Rule{r}, nil
}

func strict(data []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return fmt.Errorf("rules: %w", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return errors.New("rules: there is more behind the JSON value")
	}
	return nil
}
