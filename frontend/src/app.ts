// The console's scripts. Pages are whole without them: scripts keep what is shown fresh, draw curves, follow a subject, and serve the keyboard.
import { drawCharts } from "./chart";
import { copyButtons } from "./copy";
import { keyboard } from "./keys";
import { keepLive } from "./live";
import { rings } from "./ring";
import { tails } from "./tail";

keepLive();
drawCharts();
tails();
copyButtons();
keyboard();
rings();
