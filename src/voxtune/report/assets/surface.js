// The surface of labels in a mask as triangles (naive surface nets: one vertex per cell that the surface crosses, the mean of
// its crossings), for the 3D view. Two rounds of averaging with the neighbours remove the steps between voxels.
Voxtune.surface = (() => {
  const SMOOTHING = 2;
  const CORNERS = [0, 1, 2, 3, 4, 5, 6, 7].map((c) => [c & 1, (c >> 1) & 1, c >> 2]);
  const EDGES = CORNERS.flatMap((_, a) => [1, 2, 4].filter((bit) => !(a & bit)).map((bit) => [a, a | bit]));
  const AXES = [[0, 1, 2], [1, 2, 0], [2, 0, 1]];

  // First and last voxel of the label on each axis; null without any.
  function bounds(values, number, [nx, ny, nz]) {
    const low = [nx, ny, nz], high = [-1, -1, -1];
    for (let z = 0, i = 0; z < nz; z++) for (let y = 0; y < ny; y++) for (let x = 0; x < nx; x++, i++) {
      if (values[i] !== number) continue;
      low[0] = Math.min(low[0], x); low[1] = Math.min(low[1], y); low[2] = Math.min(low[2], z);
      high[0] = Math.max(high[0], x); high[1] = Math.max(high[1], y); high[2] = Math.max(high[2], z);
    }
    return high[0] < 0 ? null : { low, high };
  }

  // The label's box as bytes, with an empty voxel on all sides.
  function crop(values, number, size, { low, high }) {
    const [nx, ny, nz] = low.map((v, axis) => high[axis] - v + 3), inside = new Uint8Array(nx * ny * nz);
    for (let z = 1; z < nz - 1; z++) for (let y = 1; y < ny - 1; y++) {
      const row = low[0] + size[0] * (low[1] + y - 1 + size[1] * (low[2] + z - 1));
      for (let x = 1; x < nx - 1; x++) inside[x + nx * (y + ny * z)] = values[row + x - 1] === number ? 1 : 0;
    }
    return { inside, shape: [nx, ny, nz] };
  }

  function net({ inside, shape: [nx, ny, nz] }) {
    const vertices = new Int32Array(inside.length).fill(-1), points = [], neighbours = [], triangles = [];
    const offsets = CORNERS.map(([x, y, z]) => x + nx * (y + ny * z)), steps = [1, nx, nx * ny];
    const link = (a, b) => {
      neighbours[a].push(b);
      neighbours[b].push(a);
    };
    for (let z = 0; z < nz - 1; z++) for (let y = 0; y < ny - 1; y++) for (let x = 0; x < nx - 1; x++) {
      const cell = x + nx * (y + ny * z);
      const corner = offsets.map((o) => inside[cell + o]), count = corner.reduce((sum, c) => sum + c, 0);
      if (count === 0 || count === 8) continue;
      const crossings = EDGES.filter(([a, b]) => corner[a] !== corner[b]);
      vertices[cell] = points.length;
      neighbours.push([]);
      points.push([x, y, z].map((v, axis) => v + crossings.reduce((sum, [a, b]) => sum + CORNERS[a][axis] + CORNERS[b][axis], 0) / (2 * crossings.length)));
      // A face for each edge at corner 0 that is crossed; the other three cells at that edge precede this one.
      for (const [along, b, c] of AXES) {
        if (corner[0] === corner[1 << along]) continue;
        const face = [cell, cell - steps[b], cell - steps[b] - steps[c], cell - steps[c]].map((i) => vertices[i]);
        const [p, q, r, s] = corner[0] ? face : [...face].reverse();
        triangles.push(p, q, r, p, r, s);
        link(p, q); link(q, r); link(r, s); link(s, p);
      }
    }
    return { points, neighbours, triangles };
  }

  const smoothed = (points, neighbours) =>
    points.map((p, i) => p.map((v, axis) => (v + neighbours[i].reduce((sum, n) => sum + points[n][axis], 0) / neighbours[i].length) / 2));

  // `values` in voxels of `size`, mapped to mm by `affine`. Returns { points, triangles } with points in mm, or null.
  return (values, size, affine, number) => {
    const box = bounds(values, number, size);
    if (!box) return null;
    const { points, neighbours, triangles } = net(crop(values, number, size, box));
    let surface = points;
    for (let round = 0; round < SMOOTHING; round++) surface = smoothed(surface, neighbours);
    const mm = surface.flatMap((p) => [0, 1, 2].map((row) => affine[row].reduce((sum, m, axis) => sum + m * (axis === 3 ? 1 : p[axis] + box.low[axis] - 1), 0)));
    const [a, b, c] = affine;
    const mirrored = a[0] * (b[1] * c[2] - b[2] * c[1]) - a[1] * (b[0] * c[2] - b[2] * c[0]) + a[2] * (b[0] * c[1] - b[1] * c[0]) < 0;
    // Mirroring turns the front of a triangle to the back.
    if (mirrored) for (let i = 0; i < triangles.length; i += 3) [triangles[i], triangles[i + 1]] = [triangles[i + 1], triangles[i]];
    return { points: new Float32Array(mm), triangles: new Uint32Array(triangles) };
  };
})();
