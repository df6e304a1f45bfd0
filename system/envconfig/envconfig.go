// Package envconfig reads the configuration of a service from environment
// variables into a struct, and lists it for people. The struct's fields carry
// tags:
//
//	env         the variable without the service's prefix, and "required", "notEmpty"
//	envDefault  its value when it is not set
//	doc         its meaning
//	secret      "url" masks passwords and queries of URLs, "all" the whole value
//
// It guarantees that each error names a variable, never a field, and that no
// error of its own quotes a value. What values are allowed is the service's to
// say.
package envconfig

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/url"
	"os"
	"reflect"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/caarlos0/env/v11"

	"mailproof/system/contract"
)

// Read fills a T from vars, or from the process's environment when vars is nil.
// There is an error for each variable that is missing or cannot be read; the
// others are read all the same.
func Read[T any](prefix string, vars map[string]string) (T, []error) {
	var c T
	err := env.ParseWithOptions(&c, env.Options{Prefix: prefix, Environment: orProcess(vars)})
	var all env.AggregateError
	switch {
	case err == nil:
		return c, nil
	case !errors.As(err, &all):
		return c, []error{err}
	}
	problems := make([]error, len(all.Errors))
	for i, e := range all.Errors {
		problems[i] = problem[T](prefix, e)
	}
	return c, problems
}

func problem[T any](prefix string, err error) error {
	var parse env.ParseError
	var unset env.VarIsNotSetError
	var empty env.EmptyVarError
	switch {
	case errors.As(err, &parse):
		return fmt.Errorf("%s: %w", variable[T](prefix, parse.Name), parse.Err)
	case errors.As(err, &unset):
		return fmt.Errorf("%s: must be set", unset.Key)
	case errors.As(err, &empty):
		return fmt.Errorf("%s: must not be empty", empty.Key)
	default:
		return err
	}
}

func orProcess(vars map[string]string) map[string]string {
	if vars == nil {
		return env.ToMap(os.Environ())
	}
	return vars
}

// Unknown lists, in order, the variables that begin with the prefix and that T
// does not have: most likely a typing error, which leaves a default in force.
func Unknown[T any](prefix string, vars map[string]string) []string {
	known := map[string]bool{}
	for f := range reflect.TypeFor[T]().Fields() {
		known[nameOf(prefix, f)] = true
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(orProcess(vars))) {
		if strings.HasPrefix(name, prefix) && !known[name] {
			out = append(out, name)
		}
	}
	return out
}

// variable is the environment variable of a field.
func variable[T any](prefix, field string) string {
	f, ok := reflect.TypeFor[T]().FieldByName(field)
	if !ok {
		return field
	}
	return nameOf(prefix, f)
}

func nameOf(prefix string, f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("env"), ",")
	return prefix + name
}

// Var is one variable with its value in force, secrets masked.
type Var struct {
	Name, Default, Value, Doc string
}

// Vars lists every variable with what c holds.
func Vars[T any](prefix string, c T) []Var {
	v := reflect.ValueOf(c)
	var out []Var
	for f := range v.Type().Fields() {
		out = append(out, Var{
			Name: nameOf(prefix, f), Default: f.Tag.Get("envDefault"),
			Value: mask(text(v.FieldByIndex(f.Index).Interface()), f.Tag.Get("secret")), Doc: f.Tag.Get("doc"),
		})
	}
	return out
}

// Describe prints one line per variable: name, value, default, meaning.
func Describe[T any](w io.Writer, prefix string, c T) error {
	tw := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(tw, "VARIABLE\tVALUE\tDEFAULT\tMEANING")
	for _, v := range Vars(prefix, c) {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\n", v.Name, dash(v.Value), dash(v.Default), v.Doc)
	}
	return tw.Flush()
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// text is a value as it is written in the environment.
func text(value any) string {
	switch v := value.(type) {
	case []string:
		return strings.Join(v, ",")
	case []time.Duration:
		names := make([]string, len(v))
		for i, d := range v {
			names[i] = contract.DelayName(d)
		}
		return strings.Join(names, ",")
	default:
		return fmt.Sprint(v)
	}
}

func mask(text, secret string) string {
	switch {
	case text == "" || secret == "":
		return text
	case secret == "all":
		return "***"
	}
	parts := strings.Split(text, ",")
	for i, p := range parts {
		parts[i] = maskURL(p)
	}
	return strings.Join(parts, ",")
}

// maskURL hides a URL's password and query; what is no URL is hidden whole.
func maskURL(s string) string {
	u, err := url.Parse(s)
	if err != nil || u.Host == "" {
		return "***"
	}
	masked := u.Scheme + "://"
	if u.User != nil {
		masked += u.User.Username() + ":***@"
	}
	masked += u.Host + u.Path
	if u.RawQuery != "" {
		masked += "?***"
	}
	return masked
}
