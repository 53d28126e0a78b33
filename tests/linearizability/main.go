// Judges histories of registers by porcupine. Usage: linearizability FILE [PICTURES]
//
// FILE has a line for each operation (register_history.py writes it). The operations of one key are one history. Of a history that is not
// linearizable it prints the key, and writes a picture into the folder PICTURES. Exit code 1 if there is one, 2 if the file cannot be read.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sort"
	"time"

	"github.com/anishathalye/porcupine"
)

// operation is one call of the store. Without an answer it may have been done at any moment after the call, or never.
type operation struct {
	Key      string `json:"key"`
	Client   int    `json:"client"`
	Kind     string `json:"kind"`
	Old      string `json:"old"`
	New      string `json:"new"`
	Found    string `json:"found"`
	Done     bool   `json:"done"`
	Unknown  bool   `json:"unknown"`
	CallNs   int64  `json:"call_ns"`
	ReturnNs int64  `json:"return_ns"`
}

// register is the model: one value, "" while the key does not exist.
var register = porcupine.Model{
	Init: func() interface{} { return "" },
	Step: func(state, input, output interface{}) (bool, interface{}) {
		value, op := state.(string), input.(operation)
		switch op.Kind {
		case "get":
			return op.Found == value, value
		case "put":
			return true, op.New
		case "exchange": // as put, and answers what was there
			return op.Unknown || op.Found == value, op.New
		case "delete":
			return op.Unknown || op.Done == (value != ""), ""
		case "swap":
			if value == op.Old {
				return op.Unknown || op.Done, op.New
			}
			return op.Unknown || (!op.Done && op.Found == value), value
		}
		panic("unknown kind of operation: " + op.Kind)
	},
	DescribeOperation: func(input, output interface{}) string {
		op := input.(operation)
		if op.Unknown {
			return fmt.Sprintf("%s %q %q: no answer", op.Kind, op.Old, op.New)
		}
		return fmt.Sprintf("%s %q %q: %v %q", op.Kind, op.Old, op.New, op.Done, op.Found)
	},
}

func read(path string) (map[string][]porcupine.Operation, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	histories := map[string][]porcupine.Operation{}
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		var op operation
		if err := json.Unmarshal(lines.Bytes(), &op); err != nil {
			return nil, err
		}
		until := op.ReturnNs
		if op.Unknown {
			until = math.MaxInt64
		}
		histories[op.Key] = append(histories[op.Key], porcupine.Operation{ClientId: op.Client, Input: op, Call: op.CallNs, Output: op, Return: until})
	}
	return histories, lines.Err()
}

func main() {
	histories, err := read(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	keys := []string{}
	for key := range histories {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	bad := 0
	for _, key := range keys {
		result, info := porcupine.CheckOperationsVerbose(register, histories[key], time.Minute)
		if result == porcupine.Ok {
			continue
		}
		bad++
		fmt.Printf("%s: %s\n", key, result)
		if len(os.Args) > 2 {
			porcupine.VisualizePath(register, info, filepath.Join(os.Args[2], filepath.Base(key)+".html"))
		}
	}
	fmt.Printf("%d histories, %d not linearizable\n", len(keys), bad)
	if bad > 0 {
		os.Exit(1)
	}
}
