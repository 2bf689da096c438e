// The parts of Apache ECharts that the report draws with; README.md says how echarts.js is made from this.
import { use } from "echarts/core";
import { BarChart, CustomChart, LineChart, ScatterChart, TreemapChart } from "echarts/charts";
import {
  DataZoomInsideComponent,
  DataZoomSliderComponent,
  GridComponent,
  LegendPlainComponent,
  TooltipComponent,
} from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";

use([BarChart, CustomChart, LineChart, ScatterChart, TreemapChart]);
use([DataZoomInsideComponent, DataZoomSliderComponent, GridComponent, LegendPlainComponent, TooltipComponent]);
use([CanvasRenderer]);

export { init } from "echarts/core";
